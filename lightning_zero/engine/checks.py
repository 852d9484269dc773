"""What can not be sharded, found before anything is."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def check_module(module: nn.Module) -> None:
    """Raise an error that says the way out if ``module`` can not be sharded."""
    for name, param in module.named_parameters():
        if isinstance(param, nn.parameter.UninitializedParameter):
            raise ValueError(
                f"Parameter '{name}' has no shape yet (lazy module). Run a forward in"
                f" `configure_model` or `setup` so that"
                " it is initialised before training begins."
            )
        own_dispatch = getattr(type(param), "__torch_function__", None)
        plain = getattr(nn.Parameter, "__torch_function__", None)
        if getattr(own_dispatch, "__func__", own_dispatch) is not getattr(
            plain, "__func__", plain
        ) or (type(param.data) is not Tensor):
            raise NotImplementedError(
                f"Parameter '{name}' is a {type(param).__name__} holding a"
                f" {type(param.data).__name__}; only plain tensors can"
                " be sharded. Convert it to a plain nn.Parameter, or train with strategy='ddp'."
            )
    for name, submodule in module.named_modules():
        if isinstance(submodule, torch.jit.ScriptModule):
            raise NotImplementedError(
                f"Module '{name}' is a TorchScript module, whose use of parameters can not be"
                " followed. Pass the Python module, or train with strategy='ddp'."
            )
        if getattr(submodule, "sparse", False) and isinstance(
            submodule, nn.Embedding | nn.EmbeddingBag
        ):
            raise NotImplementedError(
                f"Module '{name}' asks for sparse gradients, which can not be sharded. Pass"
                f" `sparse=False`, or train with"
                " strategy='ddp'."
            )
