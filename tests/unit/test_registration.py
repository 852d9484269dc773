"""The names belong to `lightning.pytorch`; others say so."""

from __future__ import annotations

import subprocess
import sys

import pytest

CASES = {
    "fabric_name": ("from lightning.fabric import Fabric", "Fabric(strategy='zero3')"),
    "fabric_object": (
        "from lightning.fabric import Fabric",
        "Fabric(strategy=lightning_zero.ZeroStrategy(2))",
    ),
    "other_name": ("import pytorch_lightning as pl", "pl.Trainer(strategy='zero3_offload')"),
    "other_object": (
        "import pytorch_lightning as pl",
        "pl.Trainer(strategy=lightning_zero.ZeroStrategy(2))",
    ),
}
RUN = """
{first}
import lightning_zero
try:
    {then}
except Exception as error:
    print(error)
"""


@pytest.mark.parametrize("name", CASES)
def test_other_trainers_say_which_one_to_use(name: str) -> None:
    first, then = CASES[name]
    pytest.importorskip("pytorch_lightning")
    code = RUN.format(first=first, then=then)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "lightning.pytorch" in done.stdout, done.stderr
    assert "zero" in done.stdout.lower()


def test_the_names_are_those_of_lightnings_trainer() -> None:
    from lightning.pytorch import Trainer

    import lightning_zero

    trainer = Trainer(strategy="zero2", accelerator="cpu", devices=1, logger=False)
    assert isinstance(trainer.strategy, lightning_zero.ZeroStrategy)
