"""Hyper-parameters that are safe to load: what is not is left out with a warning."""

from __future__ import annotations

import warnings
from typing import Any

from omegaconf import Container, OmegaConf

from lightning_zero.checkpoint.saving import is_safe

_KEYS = ("hyper_parameters", "datamodule_hyper_parameters")
_TYPES = ("hparams_type", "datamodule_hparams_type")


def safe_hyper_parameters(meta: dict[str, Any], *, warns: bool) -> dict[str, Any]:
    """Lightning's checkpoint dictionary without hyper-parameters that would need more than
    ``weights_only=True`` to be loaded. OmegaConf's containers become plain ones.
    """
    safe = {key: value for key, value in meta.items() if key not in _TYPES}
    for key in _KEYS:
        values = safe.get(key)
        if isinstance(values, Container):
            values = OmegaConf.to_container(values)
        if isinstance(values, dict):
            unsafe = [name for name, value in values.items() if not is_safe(value)]
            safe[key] = {name: value for name, value in values.items() if name not in unsafe}
            if unsafe and warns:
                warnings.warn(
                    f"The hyper-parameters {', '.join(map(repr, unsafe))} are objects that can not"
                    " be loaded safely, so the checkpoint is saved without them. Pass them to"
                    " `load_from_checkpoint`, exclude them in `save_hyperparameters(ignore=...)`,"
                    " or save with ZeroStrategy(save_format='full').",
                    stacklevel=2,
                )
    return safe
