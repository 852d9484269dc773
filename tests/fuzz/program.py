"""A program: a small model, how it is trained, and what user code does at which moment.

A seed gives a program and a program prints as a list that a person can read.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

NUM_BATCHES = 4

# What a layer is; each maps 5 features to 5. Names before a dash are variants of one kind.
LAYERS = (
    "linear",
    "linear",
    "tied",
    "norm",
    "batch_norm",
    "bare",
    "frozen",
    "twice",
    "never",
    "even_steps",
    "dropout",
    "checkpointed",
    "checkpointed_reentrant",
    "adapter",
    "adapter_swapped",
)
SKIPPED = frozenset({"never", "even_steps"})
OPTIMIZERS = ("sgd", "momentum", "adam", "adamw", "adagrad")
# They make whole steps of a rounding error, which another order of additions brings.
AMPLIFIERS = frozenset({"adam", "adamw", "adagrad"})
STYLES = (
    "automatic",
    "automatic",
    "automatic",
    "manual",
    "two_backwards",
    "two_optimizers",
    "closure",
)
ADDS_BEFORE_STEP = frozenset({"two_backwards", "two_optimizers"})
# Moments at which ops run once; at all others they have a step.
ONCE = ("on_fit_start", "on_train_start", "on_train_end", "after_fit")


@dataclass(frozen=True)
class Op:
    """One thing that user code does: what, when, to which parameter."""

    kind: str
    at: str
    step: int
    layer: int
    param: int
    value: float

    def __str__(self) -> str:
        when = self.at if self.at in ONCE else f"{self.at}, batch {self.step}"
        return f"{when}: {self.kind}(layer {self.layer}, parameter {self.param}, {self.value})"


@dataclass(frozen=True)
class Program:
    """A training run with the ops of one seed."""

    seed: int
    layers: tuple[str, ...]
    optimizer: str
    style: str
    accumulation: int
    clip_value: float | None
    has_scheduler: bool
    validates: bool
    bucket_bytes: int
    resume: str | None
    fits_twice: bool
    ops: tuple[Op, ...]

    def __str__(self) -> str:
        options = {
            "accumulation": self.accumulation if self.accumulation > 1 else None,
            "clip_value": self.clip_value,
            "scheduler": self.has_scheduler or None,
            "validation": self.validates or None,
            "resume": self.resume,
            "fits_twice": self.fits_twice or None,
        }
        extras = [f"{name} {value}" for name, value in options.items() if value is not None]
        lines = [
            f"seed {self.seed}: {self.optimizer}, {self.style}, buckets of {self.bucket_bytes} B",
            f"  layers: {', '.join(self.layers)}",
            *([f"  with {', '.join(extras)}"] if extras else []),
            *(f"  {op}" for op in self.ops),
        ]
        return "\n".join(lines)

    @property
    def adds_before_step(self) -> bool:
        """Whether gradients of several backwards meet: stages 2 and 3 add in another order."""
        return self.accumulation > 1 or self.style in ADDS_BEFORE_STEP

    @property
    def reference(self) -> str:
        """DDP that looks for unused parameters can not be told of reentrant checkpoints."""
        is_plain = "checkpointed_reentrant" in self.layers
        return "ddp" if is_plain else "ddp_find_unused_parameters_true"

    def simpler(self) -> list[Program]:
        """Programs with one thing less, the largest cuts first."""
        ops = self.ops
        halves = [ops[: len(ops) // 2], ops[len(ops) // 2 :]] if len(ops) > 3 else []
        singles = [ops[:i] + ops[i + 1 :] for i in range(len(ops))]
        plain = {
            "resume": None,
            "fits_twice": False,
            "validates": False,
            "has_scheduler": False,
            "clip_value": None,
            "accumulation": 1,
            "style": "automatic",
            "optimizer": "sgd",
        }
        cuts = [replace(self, ops=kept) for kept in [*halves, *singles]]
        cuts += [
            replace(self, **{name: value})  # type: ignore[arg-type]
            for name, value in plain.items()
            if getattr(self, name) != value
        ]
        cuts += [
            replace(self, layers=(*self.layers[:i], "linear", *self.layers[i + 1 :]))
            for i, layer in enumerate(self.layers)
            if layer != "linear"
        ]
        if len(self.layers) > 1:
            cuts.append(replace(self, layers=self.layers[:-1]))
        return cuts


def make_program(seed: int, kinds: tuple[str, ...] = (), max_ops: int = 8) -> Program:
    """The program of a seed; with ``kinds`` only ops of these."""
    from tests.fuzz import ops_hooks  # noqa: F401 - registers its kinds
    from tests.fuzz.ops import KINDS

    draw = random.Random(seed)
    layers = tuple(draw.choice(LAYERS) for _ in range(draw.randint(2, 4)))
    if "checkpointed_reentrant" in layers:
        layers = tuple("linear" if layer in SKIPPED else layer for layer in layers)
    style = draw.choice(STYLES)
    accumulation = draw.choice((1, 1, 1, 2)) if style == "automatic" else 1
    adds = accumulation > 1 or style in ADDS_BEFORE_STEP
    optimizer = draw.choice([o for o in OPTIMIZERS if not (adds and o in AMPLIFIERS)])
    names = sorted(kinds or KINDS)
    if "checkpointed_reentrant" in layers:  # torch refuses autograd.grad with them
        names = [name for name in names if not name.startswith("input_")]
    weights = [KINDS[name].weight for name in names]
    resume = draw.choice((None, None, None, None, "full", "sharded"))
    program = Program(
        seed=seed,
        layers=layers,
        optimizer=optimizer,
        style=style,
        accumulation=accumulation,
        clip_value=draw.choice((None, None, None, 0.05)) if style == "automatic" else None,
        has_scheduler=draw.random() < 0.3 and style in ("automatic", "closure"),
        validates=draw.random() < 0.3,
        bucket_bytes=draw.choice((1, 1, 200, 1 << 20)),
        resume=resume,
        fits_twice=resume is None and draw.random() < 0.15,
        ops=(),
    )
    ops = []
    for _ in range(draw.randint(1, max_ops)):
        kind = draw.choices(names, weights)[0]
        moments = [m for m in KINDS[kind].moments if _is_possible(m, program)]
        op = Op(
            kind=kind,
            at=draw.choice(moments),
            step=draw.randrange(NUM_BATCHES),
            layer=draw.randrange(len(layers) + 1),
            param=draw.randrange(4),
            value=draw.choice((0.5, 0.9, 1.5, -0.3)),
        )
        ops.append(op)
    order = {moment: index for index, moment in enumerate(("on_fit_start", "on_train_start"))}
    last = {"on_train_end": 1, "after_fit": 2}
    ops.sort(key=lambda op: (last.get(op.at, 0), order.get(op.at, 9), op.step))
    return replace(program, ops=tuple(ops))


def _is_possible(moment: str, program: Program) -> bool:
    """Within an accumulation window DDP's ``grad`` is not reduced yet."""
    return not (moment == "on_after_backward" and program.adds_before_step)
