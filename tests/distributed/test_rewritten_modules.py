"""Modules that user code rewrites during a run: pruning, parametrizations, new parameters."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelPruning
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune

from tests.support.models import Regression, mlp
from tests.support.runs import (
    DDP_UNUSED,
    STAGES,
    Case,
    ParityRun,
    check_parity,
    full_state,
    make_trainer,
    run_under_each,
)

MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9)


def same_start(net: Any = mlp) -> nn.Module:
    """The same weights on every rank, as after `seed_everything`: callbacks copy them early."""
    torch.manual_seed(11)
    return net()


def pruning(**options: Any) -> list[pl.Callback]:
    return [ModelPruning(**{"amount": 0.3, "use_lottery_ticket_hypothesis": False, **options})]


def pruned_with(**options: Any) -> Case:
    return Case(
        partial(Regression, partial(same_start), optimizer=MOMENTUM),
        callbacks=partial(pruning, **options),
        trainer={"max_epochs": 3},
    )


PRUNING = {
    "layer_wise": pruned_with(pruning_fn="l1_unstructured", use_global_unstructured=False),
    "structured": pruned_with(
        pruning_fn="ln_structured",
        use_global_unstructured=False,
        pruning_dim=0,
        pruning_norm=2,
        parameter_names=["weight"],
    ),
    "global": pruned_with(pruning_fn="l1_unstructured", use_global_unstructured=True),
    "global_of_all": pruned_with(pruning_fn="l1_unstructured", parameter_names=["weight", "bias"]),
    "lottery": pruned_with(pruning_fn="l1_unstructured", use_lottery_ticket_hypothesis=True),
    "lottery_global": pruned_with(
        pruning_fn="l1_unstructured",
        use_lottery_ticket_hypothesis=True,
        use_global_unstructured=True,
    ),
    "not_permanent": pruned_with(pruning_fn="l1_unstructured", make_pruning_permanent=False),
}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("form", PRUNING)
def test_every_form_of_model_pruning_gives_the_weights_of_ddp(form: str, stage: str) -> None:
    check_parity(PRUNING[form], stage)


class Halved(nn.Module):
    """A parametrization that can be assigned through."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight * 0.5

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight * 2.0


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).t()


def square() -> nn.Module:
    return mlp(7, 7, 7, 5)


class Rewritten(Regression):
    """Calls its functions before the batches of these numbers."""

    def __init__(self, *changes: Any, begins_with: Any = None) -> None:
        super().__init__(partial(same_start, square), optimizer=MOMENTUM)
        if begins_with is not None:
            begins_with(self)
        self.changes = changes
        self.kept: dict[str, Any] = {}

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx in (1, 3) and len(self.changes) > batch_idx // 2:
            self.changes[batch_idx // 2](self)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for name, value in self.kept.items():
            self.note(name, value)


def new_parameter(m: Rewritten) -> None:
    m.net[0].weight = nn.Parameter(m.net[0].weight.detach() * 0.5)


def new_parameter_elsewhere(m: Rewritten) -> None:
    m.net[2].bias = nn.Parameter(torch.zeros(7))


def no_bias(m: Rewritten) -> None:
    m.net[2].bias = None


def one_layer_more(m: Rewritten) -> None:
    torch.manual_seed(5)
    m.net.append(nn.Linear(5, 5))


def layers_swapped(m: Rewritten) -> None:
    m.net[0], m.net[2] = m.net[2], m.net[0]


def layer_with_the_same_weight(m: Rewritten) -> None:
    layer = nn.Linear(7, 7)
    layer.weight, layer.bias = m.net[2].weight, m.net[2].bias
    m.net[2] = layer


def tied_in_fit(m: Rewritten) -> None:
    m.net[2].weight = m.net[0].weight


def without_a_layer(m: Rewritten) -> None:
    del m.net[2]


def halved(m: Rewritten) -> None:
    parametrize.register_parametrization(m.net[2], "weight", Halved())


def symmetric(m: Rewritten) -> None:
    parametrize.register_parametrization(m.net[2], "weight", Symmetric())


def weight_norm(m: Rewritten) -> None:
    parametrizations.weight_norm(m.net[2])


def spectral_norm(m: Rewritten) -> None:
    torch.manual_seed(5)
    parametrizations.spectral_norm(m.net[2])


def unparametrized(m: Rewritten) -> None:
    parametrize.remove_parametrizations(m.net[2], "weight")


def masked(m: Rewritten) -> None:
    mask = (torch.arange(49) % 3 > 0).float().view(7, 7)
    prune.custom_from_mask(m.net[2], "weight", mask)


def masked_globally(m: Rewritten) -> None:
    pairs = [(m.net[0], "weight"), (m.net[2], "weight")]
    prune.global_unstructured(pairs, pruning_method=prune.L1Unstructured, amount=0.4)


def mask_removed(m: Rewritten) -> None:
    prune.remove(m.net[2], "weight")


def data_of_my_own(m: Rewritten) -> None:
    m.kept["mine"] = torch.full((7, 7), 0.2)
    m.net[2].weight.data = m.kept["mine"]


def mine_changed(m: Rewritten) -> None:
    m.kept["mine"].mul_(0.5)


def parts_of_one_tensor(m: Rewritten) -> None:
    m.kept["flat"] = torch.linspace(-0.5, 0.5, 98)
    for layer, part in zip((m.net[0], m.net[2]), m.kept["flat"].split(49), strict=True):
        layer.weight.data = part.view(7, 7)


def flat_changed(m: Rewritten) -> None:
    m.kept["flat"].add_(0.01)


def set_to(m: Rewritten) -> None:
    with torch.no_grad():
        m.net[2].weight.set_(torch.full((7, 7), 0.2))


def parameter_changed(m: Rewritten) -> None:
    with torch.no_grad():
        m.net[2].weight.mul_(0.5)


REWRITES: dict[str, Any] = {
    "new_parameter": (new_parameter, new_parameter_elsewhere),
    "no_bias": (no_bias,),
    "one_layer_more": (one_layer_more,),
    "layers_swapped": (layers_swapped, layers_swapped),
    "layer_with_the_same_weight": (layer_with_the_same_weight,),
    "tied_in_fit": (tied_in_fit,),
    "without_a_layer": (without_a_layer,),
    "masked": (masked, mask_removed),
    "masked_globally": (masked_globally, mask_removed),
    "data_of_my_own": (data_of_my_own, mine_changed),
    "data_of_my_own_and_the_parameter": (data_of_my_own, parameter_changed),
    "parts_of_one_tensor": (parts_of_one_tensor, flat_changed),
}
CASES = {
    name: Case(partial(Rewritten, *changes), reference=DDP_UNUSED)
    for name, changes in REWRITES.items()
}
CASES["begins_with_weight_norm"] = Case(
    partial(Rewritten, unparametrized, begins_with=weight_norm), reference=DDP_UNUSED
)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("rewrite", CASES)
def test_a_module_that_is_rewritten_in_fit_trains_as_under_ddp(rewrite: str, stage: str) -> None:
    check_parity(CASES[rewrite], stage)


def one_memory(m: Rewritten) -> None:
    m.net[2].weight.data = m.net[0].weight.data


def one_tensor_for_two(m: Rewritten) -> None:
    m.kept["mine"] = torch.full((7, 7), 0.2)
    m.net[0].weight.data = m.kept["mine"]
    m.net[2].weight.data = m.kept["mine"]


# Under DDP the first five leave the ranks with different weights: it reduces them no more.
REFUSED = {
    "halved": (Case(partial(Rewritten, halved)), "registered or removed before the run"),
    "symmetric": (Case(partial(Rewritten, symmetric)), "registered or removed before the run"),
    "spectral": (Case(partial(Rewritten, spectral_norm)), "registered or removed before the run"),
    "unparametrized": (
        Case(partial(Rewritten, unparametrized, begins_with=halved)),
        "registered or removed before the run",
    ),
    "set_to": (Case(partial(Rewritten, set_to)), "can not be exchanged by `set_`"),
    "one_tensor_for_two": (
        Case(partial(Rewritten, one_tensor_for_two)),
        r"'net.2.weight' was assigned the memory of parameter 'net.0.weight'",
    ),
}


@pytest.mark.parametrize("stage", ["zero1", "zero3"])
@pytest.mark.parametrize("name", REFUSED)
def test_memory_that_sharded_parameters_can_not_take_is_refused(name: str, stage: str) -> None:
    case, words = REFUSED[name]
    results = run_under_each(case, {stage: stage}, 2)
    assert ParityRun(case, results).is_refused(stage, words), results[stage]


def test_the_memory_of_another_parameter_is_refused_where_it_is_its_own() -> None:
    case = Case(partial(Rewritten, one_memory))
    results = run_under_each(case, {"zero1": "zero1"}, 2)
    assert ParityRun(case, results).is_refused("zero1", "was assigned the memory of parameter")


def use_between_two_fits(trainer: pl.Trainer, module: Any, case: Case) -> Any:
    """Everything that is done with a module between two runs, then a second run."""
    trainer.fit(module, case.data())
    plain = torch.optim.SGD(module.parameters(), lr=0.01)
    plain.zero_grad()
    F.mse_loss(module.net(torch.ones(2, 7)), torch.ones(2, 5)).backward()
    plain.step()
    plain.zero_grad()
    copied = pickle.loads(pickle.dumps(copy.deepcopy(module.net)))
    module.net.load_state_dict({k: v * 0.9 for k, v in copied.state_dict().items()})
    module.double().float()
    again = make_trainer(_named(trainer))
    again.fit(module, case.data())
    return full_state(copied)


def _named(trainer: pl.Trainer) -> Any:
    config = getattr(trainer.strategy, "config", None)
    return "ddp" if config is None else f"zero{config.stage}"


TWO_FITS = Case(partial(Regression, optimizer=MOMENTUM), drive=use_between_two_fits)


@pytest.mark.parametrize("stage", STAGES)
def test_a_second_fit_after_plain_use_of_the_module_gives_the_weights_of_ddp(stage: str) -> None:
    check_parity(TWO_FITS, stage)
