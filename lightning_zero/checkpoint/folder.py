"""Folders with the tensors of all ranks, which stock ``torch.distributed.checkpoint`` reads.

[Note: what is in a folder] ``__<rank>_0.distcp`` has the tensors that a rank held and ``.metadata``
says where each piece is; both are DCP's own format. ``meta.pt`` has the counts of the run
(``torch.save``) and ``manifest.json`` size and checksums of every file. A folder without a manifest
was not written here (or not completely); what DCP wrote is read through DCP's reader.

Nothing that is read is executed: ``.metadata`` may hold nothing but DCP's own classes, ``meta.pt``
is loaded with ``weights_only``, and the pickles in the ``.distcp`` files are never looked at.
"""

from __future__ import annotations

import os
from pathlib import Path

from lightning_zero.checkpoint.index import MANIFEST, METADATA
from lightning_zero.checkpoint.loading import load_tensors
from lightning_zero.checkpoint.opening import FolderInfo, TensorPart, read_info, read_meta, verify
from lightning_zero.checkpoint.saving import save_folder
from lightning_zero.checkpoint.workplace import Workplace, recover, require_replaceable

__all__ = [
    "FolderInfo",
    "TensorPart",
    "is_folder",
    "load_tensors",
    "read_info",
    "read_meta",
    "remove_folder",
    "save_folder",
    "verify",
]


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Whether there is a checkpoint (as far as a glance can tell): it has a manifest."""
    path = Path(os.path.abspath(path))
    recover(path)
    return (path / MANIFEST).is_file()


def remove_folder(path: str | os.PathLike[str]) -> None:
    """Delete a checkpoint; a kill leaves all of it or a leftover that the next save removes.

    Called by one rank. Nothing happens if it does not exist.

    Raises:
        CheckpointError: if it is a folder, but not a checkpoint.
    """
    target = Path(os.path.abspath(path))
    recover(target)
    if not os.path.lexists(target):
        return
    require_replaceable(target, MANIFEST, METADATA)
    with Workplace(target) as workplace:
        workplace.discard()
