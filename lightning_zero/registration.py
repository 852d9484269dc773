"""The names of the strategy, and what other Trainers that know them are told."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from lightning.fabric.strategies import STRATEGY_REGISTRY
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import StrategyRegistry

from lightning_zero.strategy import ZeroStrategy

_OTHERS = (
    ("pytorch_lightning.strategies", "StrategyRegistry", "pytorch_lightning's Trainer"),
    ("lightning_fabric.strategies", "STRATEGY_REGISTRY", "lightning_fabric's Fabric"),
)


def register() -> None:
    """Register the names with `lightning.pytorch`; everywhere else they say where they belong.

    The packages of the other name have classes of their own, which can not be told before they are
    imported: then it is their own message, with the strategy's name in it.
    """
    ZeroStrategy.register_strategies(StrategyRegistry)
    names = [name for name in StrategyRegistry if name.startswith("zero")]
    _register_stand_ins(STRATEGY_REGISTRY, names, "Fabric")
    for module, registry, where in _OTHERS:
        if module in sys.modules:
            _register_stand_ins(getattr(sys.modules[module], registry), names, where)


def _register_stand_ins(registry: Any, names: list[str], where: str) -> None:
    for name in names:
        if name not in registry:
            registry.register(name, _refuse, description="", chosen=name, where=where)


def _refuse(chosen: str, where: str) -> NoReturn:
    raise MisconfigurationException(
        f"strategy='{chosen}' is a strategy of `lightning.pytorch`, not of {where}. Use it with"
        " `from lightning.pytorch import Trainer`, and modules of `lightning.pytorch`."
    )
