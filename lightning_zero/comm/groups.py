"""Creates the groups that the engine communicates in, apart from Lightning's own default group.

Lightning broadcasts and reduces on the default group in every batch; sharing it from hooks that run
inside backward would interleave both kinds of traffic. The groups live as long as the default group
does and are reused by later runs.
"""

from __future__ import annotations

import weakref
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from lightning_zero.comm.collectives import (
    Collectives,
    GroupCollectives,
    NativeCollectives,
    SingleRank,
)
from lightning_zero.comm.gloo import GlooExchange
from lightning_zero.comm.watch import Sockets, StallWatch, open_sockets

_PATIENCE = timedelta(seconds=30)
_created: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupCollectives] = (
    weakref.WeakKeyDictionary()
)


def collectives_for(
    device: torch.device, stall_timeout: timedelta, known_sockets: Sockets
) -> Collectives:
    """The collectives of all ranks for tensors on ``device``. Collective: every rank.

    Args:
        device: where the tensors live.
        stall_timeout: see :class:`~lightning_zero.comm.watch.StallWatch`.
        known_sockets: sockets of the default group, to be shut down with ours when ranks stall.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return SingleRank()
    world = dist.group.WORLD
    assert world is not None
    found = _created.get(world)
    if found is None:
        groups, sockets = _make_groups(device.type)
        watch = StallWatch(
            dist.get_rank(), dist.get_world_size(), stall_timeout, {**known_sockets, **sockets}
        )
        found = (
            GlooExchange(groups[0], watch)
            if device.type == "cpu"
            else NativeCollectives(groups[0], groups[1], watch)
        )
        _created[world] = found
    elif found.is_stale:
        groups, sockets = _make_groups(device.type)
        found.use_groups(groups)
        found.watch.watch_sockets(sockets)
    found.watch.timeout = stall_timeout
    return found


def _make_groups(
    device_type: str, timeout: timedelta | None = None
) -> tuple[list[dist.ProcessGroup], Sockets]:
    before = open_sockets()
    groups = [
        dist.new_group(backend="gloo" if device_type == "cpu" else None, timeout=timeout)
        for _ in range(1 if device_type == "cpu" else 2)
    ]
    for group in groups:
        dist.barrier(group=group)
    return groups, {fd: inode for fd, inode in open_sockets().items() if before.get(fd) != inode}


def renew_groups(collectives: Collectives) -> None:
    """Talk over a new group for the rest of a run that ends badly. Collective.

    The old one may hold messages that nobody is going to read. Whoever is not there is waited for
    half a minute. With NCCL nothing is renewed: what hangs on a device can not be dropped.
    """
    if isinstance(collectives, GlooExchange):
        groups, _ = _make_groups("cpu", _PATIENCE)
        collectives.use_groups(groups)
        collectives.is_stale = True  # the next run makes groups with the timeout of its own


def default_store() -> c10d.Store:
    """The key-value store that the ranks met in."""
    return c10d._get_default_store()
