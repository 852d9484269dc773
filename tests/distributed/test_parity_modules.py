"""Modules of every kind, called in every way."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from tests.support.models import SGD, Language, Regression, mlp, regression_loader, token_loader
from tests.support.runs import STAGES, Case, check_parity


def conv_net() -> nn.Module:
    """Convolutions in channels_last memory, with batch norm's buffers."""
    net = nn.Sequential(
        nn.Conv2d(3, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Conv2d(6, 4, 3, groups=2),
        nn.BatchNorm2d(4),
        nn.Flatten(),
        nn.Linear(16, 5),
    )
    return net.to(memory_format=torch.channels_last)


def norm_net() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 5))


class CalledTwice(nn.Module):
    """One layer is called several times within a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 7)
        self.out = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.tanh(self.inner(x))
        return self.out(x)


class EncodesAndDecodes(nn.Module):
    """Has no forward; its methods read the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(7, 13) * 0.3)
        self.w2 = nn.Parameter(torch.randn(13, 5) * 0.3)

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.w1)

    def decode(self, z: Tensor) -> Tensor:
        return z @ self.w2


class OtherMethods(Regression):
    def __init__(self) -> None:
        super().__init__(EncodesAndDecodes)

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self.net.decode(self.net.encode(batch[0])), batch[1])


class ForwardFirstWithoutGrad(Regression):
    """The same net runs under no_grad and is then trained, within one step."""

    def loss(self, batch: Any) -> Tensor:
        with torch.no_grad():
            target = self.net(batch[0] + 1)
        out = self.net(batch[0])
        with torch.no_grad():
            self.note("after", self.net(batch[0]))
        return F.mse_loss(out, batch[1] + 0.1 * target)


class ThrowsOutputsAway(Regression):
    """Computes with gradients, and drops the result of some calls."""

    def loss(self, batch: Any) -> Tensor:
        self.net(batch[0] * 2)
        return super().loss(batch)


class CatchesAnException(Regression):
    """A forward fails half-way and is tried again."""

    def loss(self, batch: Any) -> Tensor:
        with contextlib.suppress(RuntimeError):
            self.net(torch.cat([batch[0], batch[0]], dim=1))
        return super().loss(batch)


@dataclass
class Output:
    value: Tensor
    extra: dict[str, Any]


class RichOutput(nn.Module):
    """Returns a dataclass with a dict of tensors, which hooks can't look into by type."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp(7, 13, 7)

    def forward(self, inputs: dict[str, Any]) -> Output:
        hidden = self.inner(inputs["nested"]["x"])
        return Output(hidden, {"list": [hidden * 2, {"twice": hidden.tanh()}], "name": "block"})


class TakesAndGivesStructures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(RichOutput() for _ in range(2))
        self.out = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            output = block({"nested": {"x": x}})
            x = output.value + output.extra["list"][0] + output.extra["list"][1]["twice"]
        return self.out(x)


class Delegates(nn.Module):
    """Forwards unknown attributes to its child, as adapters do."""

    def __init__(self) -> None:
        super().__init__()
        self.base_model = mlp(7, 13, 5)
        self.adapter = nn.Linear(7, 5)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("base_model"), name)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_model(x) + self.adapter(x)


class StoresAuxiliaryLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(7, 7)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        self.auxiliary = x.pow(2).mean() * self.inner.bias.sum()
        return torch.tanh(x)


class UsesAuxiliaryLoss(Regression):
    """The parent picks up a tensor that the child has left on itself."""

    def __init__(self) -> None:
        super().__init__(
            partial(nn.Sequential, StoresAuxiliaryLoss(), StoresAuxiliaryLoss(), nn.Linear(7, 5))
        )

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        return loss + 0.1 * self.net[0].auxiliary + 0.1 * self.net[1].auxiliary


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.rnn = kind(7, 6, num_layers=2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.rnn(x.unsqueeze(1).expand(-1, 4, -1))[0][:, -1])


class Attends(nn.Module):
    """Attention reads the weights of its child `out_proj` without calling it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.out = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.out(self.attention(x, x, x)[0])


class Transformer(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 12, dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)
        self.out = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.encoder(self.embedding(tokens)))


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.body = nn.Transformer(8, 2, 1, 1, 12, dropout=0.0, batch_first=True)
        self.out = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.out(self.body(x, x))


def weight_normed() -> nn.Module:
    conv = parametrizations.weight_norm(nn.Conv1d(4, 6, 3))
    return nn.Sequential(conv, nn.Flatten(), nn.Linear(30, 5))


def spectral_normed() -> nn.Module:
    inner = parametrizations.spectral_norm(nn.Linear(6, 6))
    return nn.Sequential(nn.Linear(7, 6), inner, nn.Tanh(), nn.Linear(6, 5))


def orthogonal() -> nn.Module:
    inner = parametrizations.orthogonal(nn.Linear(6, 6))
    return nn.Sequential(nn.Linear(7, 6), inner, nn.Tanh(), nn.Linear(6, 5))


class Checkpointed(nn.Module):
    """Recomputes each block in backward; the blocks hold a frozen and a trained layer."""

    def __init__(self, use_reentrant: bool, freezes: bool = True) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(7), nn.Dropout(0.1), nn.Linear(7, 7), nn.Tanh())
            for _ in range(3)
        )
        if freezes:
            for block in self.blocks:
                block[0].requires_grad_(False)
        self.out = nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_(self.use_reentrant)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return self.out(x)


class CheckpointsFromOutside(Checkpointed):
    """One checkpoint around all blocks."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_(self.use_reentrant)
        hidden = checkpoint(self._all_blocks, x, use_reentrant=self.use_reentrant)
        return self.out(hidden)

    def _all_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class UsesForwardHooks(Regression):
    """The user's own hooks see whole parameters and may change inputs and outputs."""

    def on_fit_start(self) -> None:
        self.net[0].register_forward_pre_hook(_double_input)
        self.net[2].register_forward_hook(_shift_output)


def _double_input(module: nn.Module, args: Any) -> Any:
    return (args[0] * 2 + module.weight.mean(),)


def _shift_output(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output + module.bias.sum()


class UsesBackwardHooks(Regression):
    """The user's backward hooks, on a module and on a tensor."""

    def on_fit_start(self) -> None:
        self.net[0].register_full_backward_pre_hook(_double_output_grad)
        self.net[2].register_full_backward_hook(_halve_input_grad)


def _double_output_grad(module: nn.Module, grads: Any) -> Any:
    return tuple(grad * 2 for grad in grads)


def _halve_input_grad(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
    return tuple(grad if grad is None else grad * 0.5 for grad in grad_input)


def legacy_weight_normed() -> nn.Module:
    """Recomputes its weight in a hook of its own, before each forward."""
    conv = nn.utils.weight_norm(nn.Conv1d(4, 6, 3))
    return nn.Sequential(conv, nn.Flatten(), nn.Linear(30, 5))


def legacy_spectral_normed() -> nn.Module:
    return nn.Sequential(nn.Linear(7, 6), nn.utils.spectral_norm(nn.Linear(6, 6)), nn.Linear(6, 5))


class CallsItself(Regression):
    """Goes through `self(...)`, the forward of the LightningModule."""

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: Any) -> Tensor:
        return F.mse_loss(self(batch[0]), batch[1])


class ReturnsADict(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": self.loss(batch), "extra": batch_idx}


class RunsLayersBackwards(Regression):
    """The order of the layers changes from step to step."""

    def __init__(self) -> None:
        super().__init__(partial(mlp, 7, 7, 7, 7, 7, 5))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        body = list(self.net[:8])
        for layer in body if batch_idx % 2 else reversed(body):
            x = layer(x)
        return F.mse_loss(self.net[8](x), y)


def _regression(net: Any, **more: Any) -> Case:
    return Case(partial(Regression, net), **more)


def _language(net: Any, **more: Any) -> Case:
    return Case(partial(Language, net), token_loader, **more)


NORM_BUFFERS = r"running_(mean|var)$"
IMAGES = partial(regression_loader, 5, 3, (3, 6, 6))
CASES = {
    "conv_channels_last": _regression(conv_net, data=IMAGES, local_state=NORM_BUFFERS),
    "batch_norm_validated": _regression(
        norm_net,
        validation_data=partial(regression_loader, 2),
        trainer={"val_check_interval": 2},
        local_state=NORM_BUFFERS,
    ),
    "called_twice": _regression(CalledTwice),
    "other_methods": Case(OtherMethods),
    "no_grad_and_grad": Case(ForwardFirstWithoutGrad),
    "outputs_thrown_away": Case(ThrowsOutputsAway),
    "exception_caught": Case(CatchesAnException),
    "rich_outputs": _regression(TakesAndGivesStructures),
    "delegates": _regression(Delegates),
    "auxiliary_loss": Case(UsesAuxiliaryLoss),
    "lstm": _regression(partial(Recurrent, nn.LSTM)),
    "gru": _regression(partial(Recurrent, nn.GRU)),
    "attention": _language(Attends),
    "transformer": _language(Transformer),
    "transformer_dropout": _language(partial(Transformer, 0.2)),
    "encoder_decoder": _language(EncoderDecoder),
    "weight_norm": _regression(weight_normed, data=partial(regression_loader, 5, 3, (4, 7))),
    "spectral_norm": _regression(spectral_normed, local_state=r"_[uv]$"),
    "orthogonal": _regression(orthogonal),
    "weight_norm_legacy": _regression(
        legacy_weight_normed, data=partial(regression_loader, 5, 3, (4, 7))
    ),
    "spectral_norm_legacy": _regression(legacy_spectral_normed, local_state=r"weight_[uv]$"),
    # SGD: the bias before the norm has no gradient but noise, of which Adam would make steps.
    "batch_norm_accumulated": Case(
        partial(Regression, norm_net, SGD),
        data=partial(regression_loader, 8),
        trainer={"accumulate_grad_batches": 3},
        local_state=NORM_BUFFERS,
    ),
    "user_backward_hooks": Case(UsesBackwardHooks),
    "checkpointed": _regression(partial(Checkpointed, False)),
    "checkpointed_reentrant": _regression(partial(Checkpointed, True)),
    "checkpointed_trainable": _regression(partial(Checkpointed, False, False)),
    "checkpointed_as_a_whole": _regression(partial(CheckpointsFromOutside, False)),
    "checkpointed_as_a_whole_reentrant": _regression(partial(CheckpointsFromOutside, True)),
    "checkpointed_accumulated": _regression(
        partial(Checkpointed, False),
        data=partial(regression_loader, 6),
        trainer={"accumulate_grad_batches": 3},
    ),
    "user_hooks": Case(UsesForwardHooks),
    "calls_itself": Case(CallsItself),
    "returns_a_dict": Case(ReturnsADict),
    "order_changes": Case(RunsLayersBackwards),
}
# Some biases here have no gradient but rounding noise, from which Adam would make whole steps.
CASES["conv_channels_last_sgd"] = Case(
    partial(Regression, conv_net, SGD), IMAGES, local_state=NORM_BUFFERS
)
CASES["attention_sgd"] = Case(partial(Language, Attends, SGD), token_loader)
CASES["transformer_sgd"] = Case(partial(Language, Transformer, SGD), token_loader)
ON_THREE_RANKS = [
    "conv_channels_last_sgd",
    "called_twice",
    "rich_outputs",
    "lstm",
    "attention_sgd",
    "transformer_sgd",
    "checkpointed",
]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", CASES)
def test_any_module_trains_as_under_ddp(name: str, stage: str) -> None:
    check_parity(CASES[name], stage)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", ON_THREE_RANKS)
def test_any_module_trains_as_under_ddp_on_three_ranks(name: str, stage: str) -> None:
    check_parity(CASES[name], stage, world_size=3)
