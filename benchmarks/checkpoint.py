"""How fast checkpoints are written and read, against the disk itself, torch.save and stock DCP.

One process, no network. Every line of the table compares runs of the same round, interleaved, on
the same file system; files are synced after writing and dropped from the page cache before reading.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from lightning_zero.checkpoint.consolidate import consolidate
from lightning_zero.checkpoint.folder import TensorPart, load_tensors, save_folder
from lightning_zero.comm.collectives import SingleRank

CHUNK = 8 << 20


def state(num_tensors: int, nbytes: int) -> dict[str, Tensor]:
    """Tensors of equal size, under the names that a run gives them."""
    numel = max(1, nbytes // num_tensors // 4)
    return {f"model.layers.{i}.weight": torch.randn(numel) for i in range(num_tensors)}


def parts(tensors: dict[str, Tensor]) -> dict[str, TensorPart]:
    return {k: TensorPart(tuple(v.shape), v.dtype, [((0,), v)]) for k, v in tensors.items()}


def drop_from_cache(path: Path) -> None:
    files = [path] if path.is_file() else [f for f in path.rglob("*") if f.is_file()]
    for file in files:
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def sync(path: Path) -> None:
    for file in [path] if path.is_file() else [f for f in path.rglob("*") if f.is_file()]:
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def write_plain(path: Path, tensors: dict[str, Tensor]) -> None:
    with path.open("wb", buffering=0) as file:
        for tensor in tensors.values():
            file.write(memoryview(tensor.numpy()).cast("B"))
        os.fsync(file.fileno())


def read_plain(path: Path, tensors: dict[str, Tensor]) -> None:
    with path.open("rb", buffering=0) as file:
        for tensor in tensors.values():
            view = memoryview(tensor.numpy()).cast("B")
            for start in range(0, len(view), CHUNK):
                file.readinto(view[start : start + CHUNK])


def write_torch(path: Path, tensors: dict[str, Tensor]) -> None:
    torch.save(tensors, path)
    sync(path)


def read_torch(path: Path, tensors: dict[str, Tensor]) -> None:
    loaded = torch.load(path, weights_only=True)
    for name, tensor in tensors.items():
        tensor.copy_(loaded[name])


def write_dcp(path: Path, tensors: dict[str, Tensor]) -> None:
    dcp.save(dict(tensors), checkpoint_id=path, no_dist=True)
    sync(path)


def read_dcp(path: Path, tensors: dict[str, Tensor]) -> None:
    dcp.load(dict(tensors), checkpoint_id=path, no_dist=True)


def write_ours(path: Path, tensors: dict[str, Tensor]) -> None:
    names = {name.removeprefix("model."): {"__tensor__": name} for name in tensors}
    save_folder(path, parts(tensors), {"state_dict": names}, {}, SingleRank())


def read_ours(path: Path, tensors: dict[str, Tensor]) -> None:
    load_tensors(path, parts(tensors))


WAYS: dict[str, tuple[Callable[..., None], Callable[..., None]]] = {
    "plain file": (write_plain, read_plain),
    "torch.save": (write_torch, read_torch),
    "stock DCP": (write_dcp, read_dcp),
    "lightning_zero": (write_ours, read_ours),
}


def timed(action: Callable[..., object], *args: object) -> float:
    start = time.perf_counter()
    action(*args)
    return time.perf_counter() - start


def measure(
    tensors: dict[str, Tensor], rounds: int, folder: Path
) -> dict[str, dict[str, list[float]]]:
    """Seconds by way and action."""
    found: dict[str, dict[str, list[float]]] = {w: {"write": [], "read": []} for w in WAYS}
    targets = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
    found["consolidate"] = {"write": []}
    for _ in range(rounds):
        for way, (write, read) in WAYS.items():
            path = folder / way.replace(" ", "_")
            found[way]["write"].append(timed(write, path, tensors))
            drop_from_cache(path)
            found[way]["read"].append(timed(read, path, targets))
            assert all(torch.equal(targets[name], tensors[name]) for name in tensors)
            if way == "lightning_zero":
                drop_from_cache(path)
                out = folder / "one.safetensors"
                found["consolidate"]["write"].append(timed(consolidate, path, out))
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=int, default=1000, help="size of the state with large tensors")
    parser.add_argument(
        "--small", type=int, default=1200, help="number of small tensors, 40 KB each"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="on the disk to measure; a temporary one")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for title, tensors in (
        (f"{options.mb} MB in 25 tensors", state(25, options.mb * 10**6)),
        (f"{options.small} tensors of 40 KB", state(options.small, options.small * 40_000)),
    ):
        nbytes = sum(t.numel() * t.element_size() for t in tensors.values())
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            found = measure(tensors, options.rounds, Path(folder))
        print(
            f"\n{title}, median of {options.rounds} rounds (least - most of the ratio in brackets)"
        )
        for way, actions in found.items():
            for action, seconds in actions.items():
                rate = nbytes / statistics.median(seconds) / 1e6
                line = f"{way:15} {action:6} {statistics.median(seconds):7.3f} s {rate:7.0f} MB/s"
                for other in ("plain file", "stock DCP"):
                    ratios = [o / s for o, s in zip(found[other][action], seconds, strict=True)]
                    line += f"   {statistics.median(ratios):6.2f} x {other}"
                    line += f" ({min(ratios):.2f} - {max(ratios):.2f})"
                print(line)


if __name__ == "__main__":
    main()
