"""Weights that stay whole for a while: what ``full_params`` does."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from lightning_zero.engine.buffer import ParamHandle
from lightning_zero.engine.units import UnitPhase, ZeroUnit
from lightning_zero.engine.weights import Weights


@contextlib.contextmanager
def held(
    weights: Weights,
    units: Sequence[ZeroUnit],
    phase: UnitPhase,
    written: Sequence[ParamHandle] | None,
) -> Iterator[None]:
    """Inside, the parameters of the units are plain and whole. Collective if they are sharded.

    What is taken from them lives as long as it is held; where weights are sharded it is a copy once
    the context has been left. Parameters that autograd has saved themselves stay whole until the
    next step, because nothing tells when the backward needs them.

    Args:
        weights: the weights of all units.
        units: which ones.
        phase: what they are used for.
        written: the parameters whose changes are kept, the same on every rank; None: changes are
            refused.

    Raises:
        RuntimeError: on exit, if a parameter was changed and ``written`` is None.
    """
    for unit in units:
        weights.enter(unit, phase)
        unit.num_holds += 1
    versions = {unit: unit.current_versions() for unit in units}
    uses = {unit: unit.num_uses for unit in units}
    try:
        yield
        changed = [h.fqn for unit in units for h in unit.changed_since(versions[unit])]
        if changed and written is None:
            raise RuntimeError(
                f"Parameters were changed inside `full_params(module)`: {', '.join(changed)}. Pass"
                " `write=True`."
            )
        with torch.no_grad():
            for handle in written or ():
                weights.adopt(handle)
    finally:
        for unit in units:
            unit.versions = unit.current_versions()
            unit.num_holds -= 1
            unit.is_in_graph |= unit.num_uses > uses[unit]
            weights.leave(unit)
            weights.done(unit)
