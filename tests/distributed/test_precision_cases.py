"""Under mixed precision the stages agree with each other in whatever a module does.

DDP has other weights there, so stage 1 is the reference; the numbers of stage 1 are those of the
recipe (test_precision_recipes.py). They must not depend on the sizes of units either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from tests.distributed import test_parity_access as access
from tests.distributed import test_parity_frozen as frozen
from tests.distributed import test_parity_gradients as gradients
from tests.distributed import test_parity_manual as manual
from tests.distributed import test_parity_modules as modules
from tests.distributed import test_parity_optimizer_use as optimizer_use
from tests.distributed import test_parity_optimizers as optimizers
from tests.distributed import test_parity_parameters as parameters
from tests.distributed import test_parity_usage as usage
from tests.support.runs import Case, check_parity

CHOSEN: list[tuple[Mapping[str, Case], tuple[str, ...]]] = [
    (access.CASES, ("writes_whole", "writes_between_steps", "swa")),
    (frozen.CASES, ("low_rank", "switched")),
    (gradients.HOOK_CASES, ("assigned", "after_backward_accumulated")),
    (manual.CASES, ("gan_toggled", "sharpness_aware")),
    (
        modules.CASES,
        (
            "conv_channels_last",
            "batch_norm_accumulated",
            "transformer",
            "spectral_norm_legacy",
            "checkpointed_reentrant",
            "user_hooks",
        ),
    ),
    (optimizer_use.CASES, ("rolls_back_momentum",)),
    (optimizers.OPTIMIZER_CASES, ("adamw_fused", "lion")),
    (
        parameters.CASES,
        (
            "tied_language_model_accumulated",
            "hostile_shapes",
            "uses_anothers_weight",
            "functional_call",
            "gradient_penalty",
            "clamped",
        ),
    ),
    (usage.CASES, ("views_kept", "prunes_midway")),
]
CASES = {
    f"bf16-mixed_{name}": replace(
        cases[name], precision={"precision": "bf16-mixed"}, reference="zero1"
    )
    for cases, names in CHOSEN
    for name in names
}
for name, case in (
    ("transformer", modules.CASES["transformer"]),
    ("gan", manual.CASES["gan_toggled"]),
):
    CASES[f"16-mixed_{name}"] = replace(
        case, precision={"precision": "16-mixed"}, reference="zero1"
    )


@pytest.mark.parametrize("stage", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("name", CASES)
def test_stages_agree_in_mixed_precision(name: str, stage: str) -> None:
    check_parity(CASES[name], stage)
