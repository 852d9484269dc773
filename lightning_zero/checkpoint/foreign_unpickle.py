"""Files of ``torch.save`` that others wrote, read without executing anything in them.

[Note: stand-ins] ``torch.load(weights_only=True)`` makes tensors and plain containers and refuses
every other class. DeepSpeed puts a handful of its own objects beside the tensors; those are known
by name here and become inert objects that only keep their attributes, so DeepSpeed need not be
installed and none of its code runs. A class of the user's own (say among the hyper-parameters) is
read if the user has allowed it with ``torch.serialization.add_safe_globals``.
"""

from __future__ import annotations

import argparse
import pathlib
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch

from lightning_zero.checkpoint.failures import CheckpointError, CorruptCheckpointError, describe
from lightning_zero.checkpoint.opening import Progress


class Inert:
    """Keeps the attributes of an object whose class is not there."""

    def __init__(self, *args: Any) -> None:
        pass


def _number(value: int) -> int:
    """Stands for the class of an enumeration of integers."""
    return int(value)


_SCALERS = ("LossScalerBase", "LossScaler", "DynamicLossScaler", "LossScaleConfig")
_STAND_INS: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    (_number, "deepspeed.runtime.zero.config.ZeroStageEnum"),
    (Inert, "deepspeed.utils.tensor_fragment.fragment_address"),
    *((Inert, f"deepspeed.runtime.fp16.loss_scaler.{name}") for name in _SCALERS),
    (argparse.Namespace, "argparse.Namespace"),
    (pathlib.PurePosixPath, "pathlib.PosixPath"),
    (pathlib.PurePosixPath, "pathlib._local.PosixPath"),
]


def load_file(path: Path) -> Any:
    """Read a file of ``torch.save``; its tensors stay on disk until they are used.

    Raises:
        CheckpointError: if it is missing, or holds an object that is not known to be harmless.
        CorruptCheckpointError: if it is damaged.
    """
    if not path.is_file():
        raise CheckpointError(f"'{path}' is missing; copy the folder again, with all its files")
    with path.open("rb") as file:
        # The format before torch 1.6 can not be mapped into memory.
        is_mappable = torch.serialization._is_zipfile(file)
    return _load(path, path, mmap=is_mappable)


def load_stream(stream: BinaryIO, path: Path) -> Any:
    """The same for bytes out of the file at ``path``."""
    return _load(stream, path, mmap=False)


def _load(source: Path | BinaryIO, path: Path, *, mmap: bool) -> Any:
    try:
        with torch.serialization.safe_globals(_STAND_INS):
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        raise _refusal(str(error), path) from None
    except Exception as error:  # a damaged file raises anything
        raise CorruptCheckpointError(
            f"'{path}' is damaged, or not a file of `torch.save` ({describe(error)})"
        ) from error


def _refusal(message: str, path: Path) -> CheckpointError:
    found = re.search(r"GLOBAL (\S+)", message)
    if found is None:  # torch's own message would advise to execute whatever there is
        return CorruptCheckpointError(f"'{path}' is damaged, or holds more than plain data")
    if "blocked" in message:
        return CheckpointError(
            f"'{path}' holds a '{found[1]}', which runs commands when it is read: do not use this"
            " file, nor read it in another way"
        )
    return CheckpointError(
        f"'{path}' holds a '{found[1]}', which could run code when it is read. If you trust that"
        " class and the origin of the file, import it and call"
        " `torch.serialization.add_safe_globals([...])` with it first"
    )


class Meter:
    """Tells how many bytes have been read."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._done = self.total = 0

    def add(self, nbytes: int) -> None:
        """So many more have been read."""
        self._done += nbytes
        if self._progress is not None:
            self._progress(self._done, max(self._done, self.total))

    def finish(self) -> None:
        """All is read; the total was an estimate."""
        if self._done < self.total:
            self.add(self.total - self._done)
