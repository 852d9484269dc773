"""The names of the backends and what each stands for."""

from __future__ import annotations

BACKENDS = {
    "lightning_ddp": "DDP through the Trainer, as `strategy='ddp'` gives it",
    "zero1": "this package, stage 1, through the Trainer",
    "zero2": "this package, stage 2, through the Trainer",
    "zero3": "this package, stage 3, through the Trainer",
    "ddp": "DistributedDataParallel in a plain loop (gradient_as_bucket_view)",
    "ddp_zero_optimizer": "DistributedDataParallel + ZeroRedundancyOptimizer in a plain loop",
    "fsdp2": "fully_shard on every block and on the root, in a plain loop",
    "lightning_fsdp2": "the same through the Trainer (ModelParallelStrategy)",
    "alone": "no communication: each process trains alone, in a plain loop",
    "lightning_alone": "no communication, through the Trainer",
}

DEFAULT_BACKENDS = (
    "lightning_ddp",
    "zero1",
    "zero2",
    "zero3",
    "ddp",
    "ddp_zero_optimizer",
    "fsdp2",
)

MALLOC_SUFFIX = "+malloc"
"""Added to a backend's name: run it with glibc told to keep freed memory (`MALLOC_SETTINGS`)."""

MALLOC_SETTINGS = {
    "MALLOC_MMAP_THRESHOLD_": str(16 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
    "MALLOC_TOP_PAD_": str(64 << 20),
}


def split_name(name: str) -> tuple[str, dict[str, str]]:
    """A backend as the user wrote it -> (its plain name, environment variables it needs)."""
    plain = name.removesuffix(MALLOC_SUFFIX)
    if plain not in BACKENDS:
        raise ValueError(
            f"Expected a backend out of {', '.join(BACKENDS)} "
            f"(with {MALLOC_SUFFIX!r} appended or not), got {name!r}."
        )
    return plain, MALLOC_SETTINGS if name.endswith(MALLOC_SUFFIX) else {}
