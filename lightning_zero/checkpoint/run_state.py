"""What a run needs besides what Lightning saves to go on as if it had not been interrupted.

That is random states, and gradients in the middle of an accumulation window.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_zero.checkpoint.random_state import gather_random_states
from lightning_zero.comm.collectives import Collectives
from lightning_zero.engine.engine import ZeroEngine
from lightning_zero.engine.saved_grads import pending_shards, pending_unreduced, restore_gradients

KEY = "lightning_zero"


def run_state(
    engine: ZeroEngine | None,
    module: nn.Module,
    device: torch.device,
    collectives: Collectives,
    *,
    is_accumulating: bool,
    is_sharded: bool,
) -> dict[str, Any]:
    """The entry of a checkpoint under ``KEY``. Collective.

    Args:
        engine: None if nothing is sharded.
        module: the module.
        device: of this rank.
        collectives: the ranks.
        is_accumulating: whether a module that is not sharded is inside an accumulation window.
        is_sharded: whether every rank writes its part of the checkpoint; else rank 0 writes it all.
    """
    state: dict[str, Any] = {"random_states": gather_random_states(device, collectives)}
    if engine is None:
        state["gradients"] = {
            name: param.grad
            for name, param in module.named_parameters()
            if is_accumulating and param.grad is not None
        }
        return state
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        shards: dict[str, Any] = dict(pending_shards(engine.grads))
        unreduced = pending_unreduced(engine.grads)
    names = collectives.all_gather_object(list(unreduced), "the gradients of a window")
    if is_sharded:
        # what another rank writes is nothing but a name here
        state["unreduced"] = [
            {name: unreduced[name] if rank == collectives.rank else None for name in of_rank}
            for rank, of_rank in enumerate(names)
        ]
    elif any(names):
        shards.update(_sums(engine, unreduced, {name for part in names for name in part}))
    state["gradients"] = shards
    return state


def _sums(
    engine: ZeroEngine, unreduced: Mapping[str, Tensor], names: set[str]
) -> dict[str, Tensor]:
    """The averages over all ranks of what they have added up so far."""
    sums = {}
    for handle in engine.handles:
        if handle.fqn in names:
            value = unreduced.get(handle.fqn)
            shape, dtype = handle.placeholder.shape, engine.grads.buckets[handle.buffer].dtype
            total = torch.zeros(shape, dtype=dtype, device=handle.buffer.device)
            if value is not None:
                total.copy_(value)
            label = f"the gradient of '{handle.fqn}'"
            engine.collectives.start_all_reduce(total, dist.ReduceOp.SUM, label).wait()
            sums[handle.fqn] = total.cpu()
    return sums


def put_away(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint as it goes into one file: hooks of a stock Trainer that loads it find the keys
    that they know, and what is ours lies among the states of the loops.
    """
    if KEY not in checkpoint or not isinstance(checkpoint.get("loops"), dict):
        return checkpoint
    rest = {key: value for key, value in checkpoint.items() if key != KEY}
    return {**rest, "loops": {**rest["loops"], KEY: checkpoint[KEY]}}


def take_out(checkpoint: dict[str, Any]) -> Mapping[str, Any]:
    """Take what is ours out of a loaded checkpoint, wherever it lies."""
    loops = checkpoint.get("loops")
    for holder in (checkpoint, loops):
        if isinstance(holder, dict) and KEY in holder:
            found: Mapping[str, Any] = holder.pop(KEY)
            return found
    return {}


def restore_run_gradients(
    engine: ZeroEngine | None, module: nn.Module, state: Mapping[str, Any]
) -> None:
    """Put the gradients of a checkpoint's window back. Every rank."""
    gradients, unreduced = state.get("gradients", {}), state.get("unreduced", [])
    if engine is not None:
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            restore_gradients(
                engine.grads, engine.handles, gradients, unreduced, engine.collectives.rank
            )
        return
    for name, param in module.named_parameters():
        parts = [part[name] for part in (gradients, *unreduced) if name in part]
        if parts:
            total = sum(part.to(param.device, param.dtype) for part in parts)
            assert isinstance(total, Tensor)
            param.grad = total
