"""``lightning-zero``: what can be done with a checkpoint on a machine without GPUs or the model.

Needs ``pip install lightning_zero[cli]``.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch

from lightning_zero.checkpoint import consolidate as consolidation
from lightning_zero.checkpoint import foreign, one_file
from lightning_zero.checkpoint.folder import read_info
from lightning_zero.checkpoint.folder import verify as verify_folder
from lightning_zero.checkpoint.opening import Progress


def consolidate(
    folder: Path, out: Path, weights_only: bool = False, max_shard_bytes: int | None = None
) -> None:
    """Make one file of a sharded checkpoint, or a .safetensors of a single file.

    Args:
        folder: the checkpoint; a single file is copied, or its weights are taken out.
        out: OUT.ckpt gets everything, as an ordinary Lightning file; OUT.safetensors the weights.
        weights_only: leave out optimizers, loops and callbacks.
        max_shard_bytes: cut a .safetensors file into several of at most this size.
    """
    if folder.is_file():
        print(f"'{folder}' is one file already", end=": ")
    with _bar(f"consolidating {folder.name}") as progress:
        files = consolidation.consolidate(
            folder,
            out,
            weights_only=weights_only,
            max_shard_bytes=max_shard_bytes,
            progress=progress,
        )
    print("wrote and verified", *files)


def inspect(folder: Path, verify: bool = False) -> None:
    """Show what is in a checkpoint, a folder or a single file.

    Args:
        folder: the checkpoint.
        verify: read every byte and compare it with the checksums.
    """
    if folder.is_file():
        found = one_file.look(folder)
        facts = {"kind": found.kind, **found.facts, "file": _size(found.bytes)}
        rows = {name: (t.shape, t.dtype) for name, t in found.tensors.items()}
    else:
        info = read_info(folder)
        facts = {key: str(value) for key, value in info.info.items()}
        facts["files"] = f"{len(info.files)}, {_size(sum(info.files.values()))}"
        rows = {name: (shape, info.dtypes[name]) for name, shape in info.shapes.items()}
    _show(str(folder), facts, rows)
    with _bar("verifying") if verify else contextlib.nullcontext() as progress:
        if not folder.is_file():
            verify_folder(folder, every_byte=verify, progress=progress)
        elif verify:
            one_file.check_file(folder)
    if verify:
        print("every byte is right")
    elif not folder.is_file():
        print("all files are there, with the right sizes")


def _show(
    title: str,
    facts: Mapping[str, str],
    rows: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console()
    table = Table(title=escape(title), show_header=False)
    for key, value in facts.items():
        table.add_row(escape(key), escape(value))
    console.print(table)
    tensors = Table("tensor", "shape", "dtype", "bytes")
    for name, (shape, dtype) in rows.items():
        nbytes = _size(math.prod(shape) * dtype.itemsize)
        tensors.add_row(escape(name), str(shape), str(dtype).removeprefix("torch."), nbytes)
    console.print(tensors)


def convert(folder: Path, out: Path, weights_only: bool = False) -> None:
    """Make an ordinary Lightning file of a checkpoint of DeepSpeed, or of a sharded one of
    Lightning's FSDP or ModelParallel strategy.

    Args:
        folder: the checkpoint.
        out: OUT.ckpt, or OUT.safetensors for the weights.
        weights_only: leave out optimizers, loops and callbacks.
    """
    with _bar(f"converting {folder.name}") as progress:
        foreign.convert(folder, out, weights_only=weights_only, progress=progress)
    print("wrote", out)


def _size(nbytes: float) -> str:
    units = ["B", "KiB", "MiB", "GiB", "TiB"]
    while nbytes >= 1024 and len(units) > 1:
        nbytes /= 1024
        units.pop(0)
    return f"{nbytes:.0f} {units[0]}" if units[0] == "B" else f"{nbytes:.1f} {units[0]}"


@contextlib.contextmanager
def _bar(title: str) -> Iterator[Progress]:
    """A progress bar that is told the bytes done and the bytes to do."""
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = TextColumn(title), BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Bar(*columns, transient=True) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def main() -> None:
    """The command ``lightning-zero``."""
    try:
        from jsonargparse import auto_cli
    except ImportError:
        sys.exit("The command needs more packages: pip install 'lightning_zero[cli]'")
    try:
        auto_cli([consolidate, inspect, convert], prog="lightning-zero")
    except (OSError, ValueError, RuntimeError) as error:
        sys.exit(f"error: {error}")
