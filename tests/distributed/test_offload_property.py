"""Generated models, offloaded in any way, train to the bits of what is not offloaded."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from hypothesis import given, note, settings
from hypothesis import strategies as st

from tests.distributed.test_property_parity import Generated, Spec, specs
from tests.support.models import regression_loader
from tests.support.offload import check_offloaded, variants
from tests.support.runs import DDP_UNUSED, Case

NAMES = sorted(variants(Path()))


@settings(max_examples=6 if settings().max_examples <= 25 else 200)
@given(
    spec=specs().filter(lambda spec: not spec.ranks_differ),
    chosen=st.lists(st.sampled_from(NAMES), min_size=2, max_size=3, unique=True),
    clips_norm=st.booleans(),
)
def test_generated_models(spec: Spec, chosen: list[str], clips_norm: bool) -> None:
    note(f"offloaded: {chosen}")
    trainer: dict[str, Any] = {"accumulate_grad_batches": spec.accumulation}
    if spec.clip_value is not None:
        algorithm = "norm" if clips_norm else "value"
        trainer |= {
            "gradient_clip_val": spec.clip_value,
            "gradient_clip_algorithm": algorithm,
        }
    data = partial(regression_loader, spec.num_batches, 2)
    case = Case(partial(Generated, spec), data, trainer=trainer, reference=DDP_UNUSED)
    with tempfile.TemporaryDirectory() as disk:
        check_offloaded(case, spec.world_size, Path(disk), tuple(chosen))
