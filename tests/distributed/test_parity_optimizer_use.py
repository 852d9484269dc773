"""An optimizer under a stage is still the optimizer that its user made."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from tests.distributed.test_parity_parameters import Blocks
from tests.support.models import Language, Regression, mlp, regression_loader, token_loader
from tests.support.runs import STAGES, Case, check_parity


class NamedParameters(Regression):
    """Gives the optimizer named parameters, which it then keeps the names of."""

    def configure_optimizers(self) -> Any:
        return optim.Adam(self.named_parameters(), lr=1e-2)

    def on_train_end(self) -> None:
        groups = self.trainer.optimizers[0].param_groups
        self.note("names", [group["param_names"] for group in groups])


class LeavesSomeOut(Regression):
    """A trainable layer that no optimizer has."""

    def __init__(self) -> None:
        super().__init__(partial(mlp, 7, 13, 11, 5))

    def configure_optimizers(self) -> Any:
        return optim.Adam([*self.net[0].parameters(), *self.net[4].parameters()], lr=1e-2)


class ShowsItsState(Regression):
    """Looks at the optimizer's state as a user would: by parameter, and as a state dict."""

    def on_train_batch_end(self, *_: Any) -> None:
        optimizer = self.trainer.optimizers[0]
        self.note("state_dict", copy.deepcopy(optimizer.state_dict()))
        self.note("kind", type(optimizer).__mro__[-3].__name__)


class RollsBack(Regression):
    """Goes back to an earlier state of weights and optimizer during the run."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        optimizer = self.trainer.optimizers[0]
        if batch_idx == 1:
            self.kept = copy.deepcopy((self.net.state_dict(), optimizer.state_dict()))
        if batch_idx == 4:
            self.net.load_state_dict(self.kept[0])
            optimizer.load_state_dict(self.kept[1])


class ChangesGroups(Regression):
    """Changes hyper-parameters of a group by hand, beyond the learning rate."""

    def configure_optimizers(self) -> Any:
        return optim.AdamW(self.parameters(), lr=1e-2)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        group = self.trainer.optimizers[0].param_groups[0]
        group["betas"] = (0.5 + 0.05 * batch_idx, 0.9)
        group["weight_decay"] = 0.1 * batch_idx
        if batch_idx == 3:
            group["lr"] = 0.1


class SharesAParameter(Regression):
    """Some parameters are in two optimizers, and are stepped by both."""

    def __init__(self) -> None:
        super().__init__(Blocks)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first, second = self.optimizers()
        loss = self.loss(batch)
        first.zero_grad()
        second.zero_grad()
        self.manual_backward(loss)
        first.step()
        second.step()
        return loss.detach()

    def configure_optimizers(self) -> Any:
        params = list(self.parameters())
        return optim.SGD(params, lr=0.1), optim.Adam(params[3:8], lr=1e-2)


class ZeroesByHand(Regression):
    """Drops or zeroes gradients without the optimizer's help; steps the bare optimizer."""

    def __init__(self) -> None:
        super().__init__(Blocks)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        if batch_idx % 3 == 0:
            self.zero_grad()
        for p in self.parameters():
            if batch_idx % 3 == 1 and p.grad is not None:
                p.grad.zero_()
            elif batch_idx % 3 == 2:
                p.grad = None
        self.manual_backward(loss)
        self.optimizers(use_pl_optimizer=False).step()
        return loss.detach()


class OverridesZeroGrad(Regression):
    """Lightning's hook for zeroing, overridden."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        for p in self.parameters():
            p.grad = None


class HooksTheStep(Regression):
    """torch's hooks around a step see the user's optimizer, and updated weights after it."""

    def configure_optimizers(self) -> Any:
        optimizer = optim.Adam(self.parameters(), lr=1e-2)
        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)
        return optimizer

    def _before(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self.note("before", len(optimizer.param_groups[0]["params"]))

    def _after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        params = optimizer.param_groups[0]["params"]
        self.note("after", [p.detach().clone() for p in params])


class DecaysAfterwards(optim.Adam):
    """A subclass with more in its step, and an attribute of its own."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.count = 0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        result = super().step(closure)
        self.count += 1
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.mul_(1 - 0.01 * self.count)
        return result


class CountsInItsGroups(optim.Optimizer):
    """Keeps a running value in its groups, as schedule-free optimizers do, and goes by it."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] / group["count"])
        return result


class NotesCounts(Regression):
    def on_train_batch_end(self, *_: Any) -> None:
        self.note("count", self.trainer.optimizers[0].param_groups[0]["count"])


class RenormalisesEmbeddings(Language):
    """`max_norm` changes rows of the weight in the forward: here the same ones on all ranks."""

    def __init__(self) -> None:
        super().__init__(_renormalised)

    def loss(self, batch: Any) -> Tensor:
        self.net[0](torch.arange(11))
        return super().loss(batch)


def _renormalised() -> nn.Module:
    return nn.Sequential(nn.Embedding(11, 8, max_norm=0.5), nn.Linear(8, 11))


CASES = {
    "named_parameters": Case(NamedParameters),
    "leaves_some_out": Case(LeavesSomeOut),
    "leaves_some_out_accumulated": Case(
        LeavesSomeOut, partial(regression_loader, 6), trainer={"accumulate_grad_batches": 3}
    ),
    "shows_its_state": Case(ShowsItsState),
    "rolls_back": Case(RollsBack, partial(regression_loader, 7)),
    "rolls_back_momentum": Case(
        partial(RollsBack, optimizer=partial(optim.SGD, lr=0.1, momentum=0.9)),
        partial(regression_loader, 7),
    ),
    "changes_groups": Case(ChangesGroups),
    "shares_a_parameter": Case(SharesAParameter),
    "zeroes_by_hand": Case(ZeroesByHand, partial(regression_loader, 7), accumulates=True),
    "overrides_zero_grad": Case(OverridesZeroGrad),
    "hooks_the_step": Case(HooksTheStep),
    "decays_afterwards": Case(partial(Regression, Blocks, partial(DecaysAfterwards, lr=1e-2))),
    "counts_in_its_groups": Case(partial(NotesCounts, Blocks, CountsInItsGroups)),
    "renormalises_embeddings": Case(RenormalisesEmbeddings, token_loader),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", CASES)
def test_an_optimizer_is_what_its_user_expects(name: str, stage: str) -> None:
    check_parity(CASES[name], stage)
