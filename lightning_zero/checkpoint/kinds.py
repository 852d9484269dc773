"""What a path is, in words for somebody who has given it to the wrong command."""

from __future__ import annotations

from pathlib import Path

from lightning_zero.checkpoint.index import MANIFEST, METADATA

KNOWN = (
    "lightning-zero inspects and consolidates checkpoints of lightning_zero"
    " (ZeroStrategy(save_format='sharded'), a folder with a manifest.json) and single files. It"
    " converts checkpoints of DeepSpeed (a folder with `*_model_states.pt`), of Lightning's FSDP"
    " and ModelParallel strategies and of torch.distributed.checkpoint (a folder with `.metadata`)"
)


def in_words(path: Path) -> str:
    """A sentence that says what is there, and which command takes it."""
    if not path.exists():
        near = next(parent for parent in path.absolute().parents if parent.exists())
        return f"'{path}' does not exist ('{near}' does)"
    if path.is_file():
        return f"'{path}' is a file; `lightning-zero inspect {path}` shows what is in it"
    return _folder_in_words(path, {entry.name for entry in path.iterdir()})


def _folder_in_words(path: Path, names: set[str]) -> str:
    if MANIFEST in names:
        return (
            f"'{path}' is a checkpoint of lightning_zero; `lightning-zero consolidate {path}"
            " OUT.ckpt` makes one file of it"
        )
    if METADATA in names or "latest" in names or _ends(names, "_model_states.pt"):
        return (
            f"'{path}' is a checkpoint of another system; `lightning-zero convert {path} OUT.ckpt`"
            " makes a Lightning file of it"
        )
    inside = [entry for entry in sorted(path.iterdir()) if _is_checkpoint(entry)]
    if inside:
        return f"'{path}' is not a checkpoint; there is one in it: '{inside[-1]}'"
    if path.parent.is_dir() and (path.parent / MANIFEST).is_file():
        return f"'{path}' is a part of the checkpoint '{path.parent}'"
    return _useless_in_words(path, names)


def _useless_in_words(path: Path, names: set[str]) -> str:
    """What no command takes."""
    if "config.json" in names or _ends(names, ".safetensors"):
        return (
            f"'{path}' is a folder of model weights as Hugging Face's libraries write it, and no"
            " checkpoint of a training run; their `from_pretrained` reads it"
        )
    if not names:
        return f"'{path}' is not a checkpoint: the folder is empty"
    if _ends(names, ".distcp"):
        return (
            f"'{path}' is not a checkpoint: it has tensors, but neither {MANIFEST} nor {METADATA},"
            " which are written last. The save was cut off, or not all files were copied"
        )
    return f"'{path}' is not a checkpoint. {KNOWN}"


def _is_checkpoint(path: Path) -> bool:
    if path.is_file():
        return path.suffix in (".ckpt", ".pt", ".pth")
    return (path / MANIFEST).is_file() or (path / METADATA).is_file()


def _ends(names: set[str], end: str) -> bool:
    return any(name.endswith(end) for name in names)
