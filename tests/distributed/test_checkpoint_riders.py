"""What rides along with a state dict: versions of modules, types, attributes, order."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lightning_zero.checkpoint.consolidate import consolidate
from tests.distributed.test_checkpoint_lightning import FORMATS, Saves, data, trainer_for
from tests.support.checkpoints import Rich
from tests.support.compare import assert_same
from tests.support.distributed import run_on_ranks
from tests.support.models import rank
from tests.support.runs import DDP_UNUSED, make_trainer


class Halves(nn.Linear):
    """From version 2 on its weights are saved as they are; older ones are mended on the way in."""

    _version = 2

    def _load_from_state_dict(
        self, state: Any, prefix: str, local_metadata: Any, *rest: Any
    ) -> None:
        self.loaded_version = local_metadata.get("version")
        if self.loaded_version is None or self.loaded_version < 2:
            state[f"{prefix}weight"] = state[f"{prefix}weight"] * 2
        super()._load_from_state_dict(state, prefix, local_metadata, *rest)


class Versioned(Rich):
    def __init__(self) -> None:
        super().__init__()
        self.last = Halves(13, 5)


def keep_versions(save_format: str, path: Path) -> None:
    saved = Versioned()
    trainer_for(save_format, max_epochs=1, callbacks=[Saves(path)]).fit(saved, data())
    loaded = Versioned()
    trainer_for(save_format, max_epochs=1).validate(loaded, data(), ckpt_path=path)
    assert loaded.last.loaded_version == 2
    assert_same(dict(loaded.state_dict()), dict(saved.state_dict()), exact=True, label="weights")
    if save_format == "sharded":
        if rank() == 0:
            consolidate(path, path.with_name("one.ckpt"))
        torch.distributed.barrier()
        path = path.with_name("one.ckpt")
    other = path.with_name("ddp.ckpt")
    module = Versioned()
    make_trainer(DDP_UNUSED, callbacks=[Saves(other)], use_distributed_sampler=False).fit(
        module, data()
    )
    ours, theirs = (torch.load(file, weights_only=True)["state_dict"] for file in (path, other))
    assert type(ours) is type(theirs) is OrderedDict
    assert list(ours) == list(theirs)
    assert ours._metadata == theirs._metadata
    assert type(ours._metadata) is OrderedDict
    resumed = Versioned.load_from_checkpoint(path, map_location="cpu")
    assert torch.equal(resumed.last.weight, saved.last.weight)


@pytest.mark.parametrize("save_format", FORMATS)
def test_versions_of_modules_are_saved(save_format: str, tmp_path: Path) -> None:
    run_on_ranks(keep_versions, 2, save_format, tmp_path / "versioned.ckpt")
