"""How many bytes will rest where, before anything is sharded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch import nn
from torch.optim import Optimizer

from lightning_zero.config import PrecisionPolicy
from lightning_zero.engine.dtypes import param_dtypes
from lightning_zero.engine.offload import choose_places
from lightning_zero.engine.probe import state_bytes_per_element


def offload_forecast(  # noqa: PLR0913
    module: nn.Module,
    optimizers: Sequence[Optimizer],
    policy: PrecisionPolicy,
    states: str | None,
    params: str | None,
    *,
    is_on_host: bool,
    is_sharded: bool,
    is_delayed: bool,
) -> Counter[str]:
    """Bytes that will rest in each place, of all ranks together.

    Args:
        module: with full parameters.
        optimizers: over its parameters.
        policy: the dtypes of the run.
        states, params: the places, "cpu", "nvme" or None.
        is_on_host: whether the model is computed on the CPU.
        is_sharded: whether model weights are sharded.
        is_delayed: whether updates arrive one step late.
    """
    stepped = {
        param: (optimizer, index)
        for optimizer in optimizers
        for index, group in enumerate(optimizer.param_groups)
        for param in group["params"]
    }
    needed: Counter[str] = Counter()
    for param, dtypes in param_dtypes(module, policy).items():
        is_trainable = param.requires_grad
        has_master = dtypes.master != dtypes.model and (
            is_trainable or param.dtype == dtypes.master
        )
        places = choose_places(
            states,
            params,
            has_master=has_master,
            is_trainable=is_trainable,
            is_sharded=is_sharded,
            is_on_host=is_on_host,
            is_delayed=is_delayed,
        )
        stepped_dtype = dtypes.master if has_master else dtypes.model
        needed[places.shard] += param.numel() * stepped_dtype.itemsize
        if places.has_model:
            needed[places.model] += param.numel() * dtypes.model.itemsize
        needed[places.grad] += param.numel() * stepped_dtype.itemsize * (2 if is_delayed else 1)
        # what is no floating-point number is never stepped, whoever passes it to an optimizer
        is_float = stepped_dtype.is_floating_point or stepped_dtype.is_complex
        if param in stepped and states is not None and is_float:
            optimizer, index = stepped[param]
            per_element = state_bytes_per_element(optimizer, stepped_dtype, index)
            needed[states] += param.numel() * per_element
    return Counter({place: count for place, count in needed.items() if place is not None})
