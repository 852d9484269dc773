"""The module that runs a program: tiny layers of every kind, and moments at which ops run."""

from __future__ import annotations

import os
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.fuzz import ops_hooks  # noqa: F401 - registers its kinds
from tests.fuzz.ops import KINDS
from tests.fuzz.program import NUM_BATCHES, ONCE, Op, Program
from tests.support import models
from tests.support.models import Recording, regression_loader
from tests.support.runs import Case, fine_strategy, make_trainer

WIDTH = 5
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.05),
    "momentum": partial(torch.optim.SGD, lr=0.05, momentum=0.9, weight_decay=0.01),
    "adam": partial(torch.optim.Adam, lr=1e-2),
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2),
}


class Running:
    """The module whose program runs on this rank. Layers find it here: nothing of it is copied
    with them.
    """

    module: Fuzzed | None = None


class Layer(nn.Module):
    """One layer of a program; its moment ``in_layer`` lies inside of the module call."""

    def __init__(self, index: int, kind: str, twin: Layer | None) -> None:
        super().__init__()
        self.index, self.kind = index, kind
        self.main = nn.Linear(WIDTH, WIDTH)
        self.side: nn.Module | None = None
        self.scale: nn.Parameter | None = None
        if kind == "tied" and twin is not None:
            self.main.weight = twin.main.weight
        elif kind == "norm":
            self.side = nn.LayerNorm(WIDTH)
        elif kind == "batch_norm":
            self.side = nn.BatchNorm1d(WIDTH)
        elif kind == "dropout":
            self.side = nn.Dropout(0.3)
        elif kind == "bare":
            self.scale = nn.Parameter(torch.full((WIDTH,), 0.7))
        elif kind == "frozen":
            self.main.requires_grad_(False)
        elif kind.startswith(("adapter", "checkpointed")):
            self.main.requires_grad_(not kind.startswith("adapter"))
            self.side = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind.startswith("checkpointed"):
            reentrant = self.kind.endswith("reentrant")
            out: Tensor = checkpoint(self.compute, x, use_reentrant=reentrant)  # type: ignore[assignment]
            return out
        return self.compute(self.compute(x) if self.kind == "twice" else x)

    def compute(self, x: Tensor) -> Tensor:
        module = Running.module
        if module is not None:
            module.at("in_layer", layer=self.index)
        if self.kind in ("checkpointed", "adapter"):
            return torch.tanh(self.main(x) + self.side(x))  # type: ignore[misc]
        if self.kind in ("checkpointed_reentrant", "adapter_swapped"):
            return torch.tanh(self.side(x) + self.main(x))  # type: ignore[misc]
        out = torch.tanh(self.main(x))
        if self.scale is not None:
            out = out * self.scale
        return out if self.side is None else self.side(out)


class Fuzzed(Recording):
    """Trains as its program says, and keeps what the ops have read."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        layers: list[Layer] = []
        for index, kind in enumerate(program.layers):
            twin = next((layer for layer in layers if layer.kind in ("linear", "tied")), None)
            layers.append(Layer(index, kind, twin))
        self.net = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, 3)
        self.automatic_optimization = program.style == "automatic"
        self.batch = -1
        self.kept: dict[str, Any] = {}  # what ops hold from one moment to another
        self.extra: list[Tensor] = []  # what ops add to the loss
        Running.module = self

    # -- ops

    def at(self, moment: str, layer: int | None = None) -> None:
        """Run the ops of a moment."""
        for index, op in enumerate(self.program.ops):
            is_due = moment in ONCE or op.step == self.batch
            if op.at == moment and is_due and (layer is None or self.layer_index(op) == layer):
                self.note(f"{index} {op}", KINDS[op.kind].run(self, op))

    def layer_index(self, op: Op) -> int:
        return op.layer % (len(self.net) + 1)

    def layer_of(self, op: Op) -> nn.Module:
        index = self.layer_index(op)
        return self.net[index] if index < len(self.net) else self.head

    def param_of(self, op: Op) -> nn.Parameter:
        params = list(self.layer_of(op).parameters())
        return params[op.param % len(params)]

    # -- training

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.net:
            is_used = {"never": False, "even_steps": self.batch % 2 == 0}.get(layer.kind, True)
            x = layer(x) if is_used else x
        return self.head(x)  # type: ignore[no-any-return]

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        self.extra = []
        self.at("step_begin")
        out = self(x.requires_grad_())
        self.kept["input"], self.kept["output"] = x, out
        self.at("step_end")
        loss = F.mse_loss(out, y)
        for term in self.extra:
            loss = loss + term
        self.extra = []
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        style = self.program.style
        if style == "automatic":
            return self.loss(batch)
        optimizers = self.optimizers()
        optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
        for optimizer in optimizers:
            optimizer.zero_grad()
        if style == "closure":
            return self._closure_step(optimizers[0], batch)
        loss = self.loss(batch)
        self.manual_backward(loss)
        if style == "two_backwards":
            self.manual_backward(F.l1_loss(self(batch[0]), batch[1]))
        for optimizer in optimizers:
            optimizer.step()
        return loss.detach()

    def _closure_step(self, optimizer: Any, batch: Any) -> Tensor:
        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        return optimizer.step(closure=closure).detach()  # type: ignore[no-any-return]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", F.mse_loss(self(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        make = OPTIMIZERS[self.program.optimizer]
        if self.program.style == "two_optimizers":
            return [make(self.net.parameters()), make(self.head.parameters())]
        optimizer = make([{"params": self.net.parameters()}, {"params": self.head.parameters()}])
        if not self.program.has_scheduler:
            return optimizer
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    # -- moments

    def on_fit_start(self) -> None:
        self.at("on_fit_start")

    def on_train_start(self) -> None:
        # DDP draws other numbers after a checkpoint; the stages go on with the same ones
        torch.manual_seed(400 + models.rank())
        self.at("on_train_start")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.batch += 1
        self.at("on_train_batch_start")

    def on_before_backward(self, loss: Tensor) -> None:
        self.at("on_before_backward")

    def on_after_backward(self) -> None:
        self.at("on_after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.at("on_before_optimizer_step")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.at("on_train_batch_end")

    def on_validation_epoch_start(self) -> None:
        self.at("on_validation_epoch_start")

    def on_train_end(self) -> None:
        self.at("on_train_end")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["batch"] = self.batch

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.batch = checkpoint["batch"]


def drive(trainer: pl.Trainer, module: pl.LightningModule, case: Case) -> Any:
    """Fit as the program says. Collective; the module that ends up trained gives its state."""
    assert isinstance(module, Fuzzed)
    program = module.program
    validation = regression_loader(2, 2, (WIDTH,), (3,), seed=9) if program.validates else None
    trainer.fit(module, case.data(), validation)
    result: dict[str, Any] = {}
    if program.resume is not None:
        result = _resume(trainer, module, case)
    if program.fits_twice:
        module.batch = -1
        _train_plainly(module)
        again = make_trainer(_same_strategy(trainer, program), **_options(program))
        again.fit(module, case.data(), validation)
    module.at("after_fit")
    return result


def _train_plainly(module: Fuzzed) -> None:
    """Between two runs a module is an ordinary one."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    x, y = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH), torch.ones(4, 3)
    for _ in range(2):
        optimizer.zero_grad()
        F.mse_loss(module(x), y).backward()
        optimizer.step()
    optimizer.zero_grad()


def _resume(trainer: pl.Trainer, module: Fuzzed, case: Case) -> dict[str, Any]:
    """Save, and go on from there in a new trainer with a new module."""
    folder = Path(tempfile.gettempdir()) / f"fuzz_{_run_key()}_{module.program.seed}"
    path = str(folder / f"{type(trainer.strategy).__name__}.ckpt")
    trainer.save_checkpoint(path)
    torch.manual_seed(300 + models.rank())
    program = module.program
    other = Fuzzed(program)
    options = _options(program) | {"max_epochs": 2}
    again = make_trainer(_same_strategy(trainer, program), **options)
    again.fit(other, case.data(), ckpt_path=path, weights_only=False)
    Running.module = module
    if models.rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    notes = {f"resumed {name}": value for name, value in other.notes.items()}
    state = {name: value.detach().clone() for name, value in other.state_dict().items()}
    return {"notes": notes, "state": state}


def _run_key() -> str:
    """Names this run's files: the store's port is the same on all ranks and nobody else's."""
    return os.environ["MASTER_PORT"]


def _options(program: Program) -> dict[str, Any]:
    automatic = program.style == "automatic"
    options: dict[str, Any] = {"accumulate_grad_batches": program.accumulation} if automatic else {}
    if automatic and program.clip_value is not None:
        options |= {
            "gradient_clip_val": program.clip_value,
            "gradient_clip_algorithm": "value",
        }
    return options


def _same_strategy(trainer: pl.Trainer, program: Program) -> Any:
    config = getattr(trainer.strategy, "config", None)
    if config is None:
        return program.reference
    return partial(fine_strategy, f"zero{config.stage}", config.bucket_bytes, config.save_format)


def case_of(program: Program) -> Case:
    """The run of a program, without its strategy."""
    return Case(
        partial(Fuzzed, program),
        partial(regression_loader, NUM_BATCHES, 2, (WIDTH,), (3,)),
        trainer=_options(program),
        drive=drive,
        reference=program.reference,
        # DDP reduces what the first of two backwards has left once more with the second
        is_exact=program.style != "two_backwards",
        accumulates=program.adds_before_step,
        local_state="running_|num_batches",
    )
