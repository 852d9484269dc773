"""What differs between the stages: one row of data each.

| stage | model weights | gradients                         | optimizer state, master weights |
|-------|---------------|-----------------------------------|---------------------------------|
| 1     | replicated    | unreduced until the accumulation  | sharded                         |
|       |               | boundary, then sharded            |                                 |
| 2     | replicated    | sharded                           | sharded                         |
| 3     | sharded       | sharded                           | sharded                         |

Source: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models",
section 5.
"""

from __future__ import annotations

import enum
from typing import NamedTuple


class Placement(enum.Enum):
    """Where a kind of state lives."""

    REPLICATED = "replicated"
    UNREDUCED = "unreduced"
    SHARDED = "sharded"


class Placements(NamedTuple):
    """The row of one stage."""

    weight: Placement
    grad: Placement
    optimizer: Placement


PLACEMENTS = {
    1: Placements(Placement.REPLICATED, Placement.UNREDUCED, Placement.SHARDED),
    2: Placements(Placement.REPLICATED, Placement.SHARDED, Placement.SHARDED),
    3: Placements(Placement.SHARDED, Placement.SHARDED, Placement.SHARDED),
}


def placements_of(stage: int, world_size: int, *, offloads_weights: bool = False) -> Placements:
    """The row of ``stage``; one rank alone holds everything, so its weights need no gathering
    unless they rest on an offload device.
    """
    row = PLACEMENTS[stage]
    is_whole = world_size == 1 and not offloads_weights
    return row._replace(weight=Placement.REPLICATED) if is_whole else row
