"""Training checkpoints of other systems, read into the dictionary of an ordinary Lightning one.

DeepSpeed's ZeRO folders (by DeepSpeed itself or through Lightning's ``DeepSpeedStrategy``), the
folders of Lightning's ``FSDPStrategy`` and ``ModelParallelStrategy``, and folders of
``torch.distributed.checkpoint``. None of these libraries is needed, no process group either, and
nothing in the files is executed. Tensors are assembled one after the other from files that stay on
disk; memory is needed for the result and one more tensor.
"""

from __future__ import annotations

import importlib
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_zero.checkpoint.failures import CheckpointError, CorruptCheckpointError, describe
from lightning_zero.checkpoint.files import sync
from lightning_zero.checkpoint.foreign_dcp import has_meta, is_dcp, read_dcp
from lightning_zero.checkpoint.foreign_deepspeed import find_tag, read_deepspeed
from lightning_zero.checkpoint.foreign_unpickle import Meter
from lightning_zero.checkpoint.index import MANIFEST
from lightning_zero.checkpoint.kinds import KNOWN, in_words
from lightning_zero.checkpoint.opening import Progress

# Lightning migrates a checkpoint from the version that wrote it; what we make is like this one's.
_LIGHTNING_VERSION = "2.5.0"
_OF_TRAINING = ("optimizer_states", "lr_schedulers", "callbacks", "loops")


def foreign_kind(folder: Path) -> str | None:
    """Whose checkpoint it is: ``deepspeed``, ``lightning_fsdp``, ``dcp`` or None.

    ``lightning_fsdp`` are folders of both FSDPStrategy and ModelParallelStrategy. Folders of our
    own are nobody else's: None, though DCP can read them.

    Raises:
        CheckpointError: if a folder of DeepSpeed lacks the checkpoint that it names as its newest.
    """
    folder = Path(folder)
    if (folder / MANIFEST).is_file():
        return None
    if is_dcp(folder):
        return "lightning_fsdp" if has_meta(folder) else "dcp"
    return "deepspeed" if find_tag(folder) is not None else None


def read_foreign(
    folder: Path, *, weights_only: bool = False, progress: Progress | None = None
) -> dict[str, Any]:
    """Read a checkpoint of another system.

    Args:
        folder: the folder that was given to the other system, or the one of a tag in it.
        weights_only: leave out optimizers.
        progress: called with the bytes read so far and the bytes there are, about.

    Returns:
        ``state_dict`` with fp32 master weights where there were any, ``optimizer_states`` in the
        format of ``Optimizer.state_dict``, and whatever Lightning saved beside.

    Raises:
        CheckpointError: if it is of no known kind, or incomplete, or holds objects that are not
            known to be harmless.
        CorruptCheckpointError: if its files are damaged or contradict each other.
    """
    folder, meter = Path(folder), Meter(progress)
    kind = foreign_kind(folder)
    if kind is None:
        raise CheckpointError(f"{in_words(folder)}. There is nothing to convert: {KNOWN}")
    try:
        if kind == "deepspeed":
            tag = find_tag(folder)
            assert tag is not None
            result = read_deepspeed(tag, meter, weights_only=weights_only)
        else:
            result = read_dcp(folder, meter, weights_only=weights_only)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CorruptCheckpointError(
            f"'{folder}' is not laid out like a checkpoint of the kind '{kind}'"
            f" ({describe(error)}); it may be damaged, or of a newer version"
        ) from error
    meter.finish()
    for key, value in (("pytorch-lightning_version", _LIGHTNING_VERSION), ("epoch", 0)):
        result.setdefault(key, value)
    result.setdefault("global_step", 0)
    if not weights_only:
        result.setdefault("lr_schedulers", [])
    return result


def convert(
    folder: Path, out: Path, *, weights_only: bool = False, progress: Progress | None = None
) -> None:
    """Write a checkpoint of another system as one file; a kill leaves all of it or nothing.

    Args:
        folder: see :func:`read_foreign`.
        out: ``*.safetensors`` for the weights alone (needs the package ``safetensors``), and any
            other name for a checkpoint that ``Trainer.fit(ckpt_path=...)`` reads.
        weights_only: leave out what only training needs.
        progress: see :func:`read_foreign`.

    Raises:
        CheckpointError: see :func:`read_foreign`; or if the file can not be written.
    """
    out = Path(out)
    is_safetensors = out.suffix == ".safetensors"
    write = _safetensors_writer() if is_safetensors else torch.save
    if out.is_dir():
        raise CheckpointError(f"'{out}' is a folder; give the name of a file")
    without_training = weights_only or is_safetensors
    content = read_foreign(folder, weights_only=without_training, progress=progress)
    if without_training:
        content = {key: value for key, value in content.items() if key not in _OF_TRAINING}
    if is_safetensors:
        content = _unshared(content["state_dict"])
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as work:
        temporary = Path(work) / out.name
        write(content, temporary)
        sync(temporary)
        temporary.replace(out)
    sync(out.parent)


def _unshared(state_dict: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors, each in memory of its own: the format has no tied weights."""
    seen: set[int] = set()
    tensors: dict[str, Tensor] = {}
    for name, value in state_dict.items():
        if isinstance(value, Tensor):
            tensors[name] = value.clone() if id(value) in seen else value.contiguous()
            seen.add(id(value))
    return tensors


def _safetensors_writer() -> Any:
    try:
        return importlib.import_module("safetensors.torch").save_file
    except ImportError as error:
        raise CheckpointError(
            "a `.safetensors` file needs the package: `pip install safetensors`; or give a name"
            " that ends with `.ckpt`"
        ) from error
