"""Watches a step for operations that mix the elements of a tensor.

Comparing results finds what makes a difference in the trial. A norm that scales nothing yet, or a
projection that waits for gradients of another kind, makes none there and one later; but it is
computed, and can be seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode  # public by its use in torch's docs

_SAME_SIZE = frozenset(
    {
        "cumsum",
        "cumprod",
        "cummax",
        "cummin",
        "logcumsumexp",
        "_cummax_helper",
        "_cummin_helper",
        "sort",
        "argsort",
        "msort",
        "_softmax",
        "_log_softmax",
        "softmax",
        "log_softmax",
        "roll",
        "flip",
        "fliplr",
        "flipud",
        "rot90",
        "renorm",
        "mm",
        "bmm",
        "addmm",
        "baddbmm",
        "matmul",
        "linalg_qr",
        "inverse",
        "cholesky",
        "take",
        "index",
        "gather",
        "scatter",
        "scatter_add",
        "index_add",
    }
)
"""Operations whose result has as many elements as their input, and mixes them anyway."""

_ONLY_JOIN = frozenset({"cat", "stack"})


class MixingFoundError(Exception):
    """Ends a step that mixes elements: what follows may take minutes (a decomposition)."""


class MixingWatch(TorchDispatchMode):
    """Raises at the first operation that makes an element depend on another, or on chance.

    ``found`` is its name, should the step have caught the error; ``is_on`` says whether to look.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: str | None = None
        self.is_on = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation, and look at what went in and came out."""
        result = func(*args, **(kwargs or {}))
        if self.is_on and self.found is None and _mixes(func, args, kwargs or {}, result):
            name = func.overloadpacket.__name__
            self.found = name.removeprefix("_foreach_").strip("_")
            raise MixingFoundError(self.found)
        return result


def _mixes(func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> bool:
    if torch.Tag.nondeterministic_seeded in func.tags:
        return True
    if func.namespace != "aten":
        return False  # of others nothing is known: their results are compared
    given = [a for a in (*args, *kwargs.values()) if isinstance(a, Tensor | list | tuple)]
    shapes = [[t.shape for t in _tensors(a) if t.numel() > 1] for a in given]
    name = func.overloadpacket.__name__
    if func.is_view or name in _ONLY_JOIN or name.startswith("new_") or not any(shapes):
        return False
    if name.removeprefix("_foreach_").strip("_") in _SAME_SIZE:
        return True
    if name.startswith("_foreach_") or name.startswith("_fused_"):
        return _reduces(given, result) or _is_uneven(given)
    known = {shape for some in shapes for shape in some}
    return len(known) > 1 or _reduces(given, result)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _tensors(entry)


def _reduces(given: Sequence[Any], result: Any) -> bool:
    """Whether what came out is smaller than what went in."""
    most_in = max((t.numel() for a in given for t in _tensors(a)), default=0)
    made: list[Tensor] = list(_tensors(result))
    return bool(made) and max(t.numel() for t in made) < most_in


def _is_uneven(given: Sequence[Any]) -> bool:
    """Whether lists of tensors are combined that differ in shape, entry by entry."""
    lists = [a for a in given if isinstance(a, list | tuple) and any(True for _ in _tensors(a))]
    return any(
        len({e.shape for e in entry if isinstance(e, Tensor) and e.numel() > 1}) > 1
        for entry in zip(*lists, strict=False)
    )
