"""Structural comparison of what two runs left behind, with a readable list of differences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# What PARITY means where only the order of additions differs.
RTOL, ATOL = 1e-5, 1e-6
MAX_DIFFERENCES = 12


def assert_same(got: Any, want: Any, *, exact: bool, label: str) -> None:
    """Compare two nested values; bitwise, or within rounding.

    Raises:
        AssertionError: naming the first places that differ.
    """
    found = differences(got, want, exact=exact)
    if found:
        how = "bitwise" if exact else f"to rtol {RTOL}, atol {ATOL}"
        shown = "\n  ".join(found[:MAX_DIFFERENCES])
        more = len(found) - MAX_DIFFERENCES
        rest = f"\n  and {more} more" if more > 0 else ""
        raise AssertionError(f"{label}: not equal {how}:\n  {shown}{rest}")


def differences(got: Any, want: Any, *, exact: bool, path: str = "") -> list[str]:
    """Where and how two nested values differ."""
    if isinstance(want, Tensor):
        return _tensor_differences(got, want, exact, path)
    if isinstance(want, Mapping):
        return _mapping_differences(got, want, exact, path)
    if isinstance(want, Sequence) and not isinstance(want, str | bytes):
        if not isinstance(got, Sequence) or len(got) != len(want):
            return [f"{path}: {_brief(got)} instead of {_brief(want)}"]
        pairs = enumerate(zip(got, want, strict=True))
        return [
            line
            for index, (a, b) in pairs
            for line in differences(a, b, exact=exact, path=f"{path}[{index}]")
        ]
    if isinstance(want, float) and isinstance(got, float):
        same = got == want or (math.isnan(got) and math.isnan(want))
        if not same and not exact:
            same = math.isclose(got, want, rel_tol=RTOL, abs_tol=ATOL)
        return [] if same else [f"{path}: {got!r} instead of {want!r}"]
    return [] if got == want else [f"{path}: {_brief(got)} instead of {_brief(want)}"]


def _tensor_differences(got: Any, want: Tensor, exact: bool, path: str) -> list[str]:
    if not isinstance(got, Tensor):
        return [f"{path}: {_brief(got)} instead of a tensor"]
    if got.shape != want.shape or got.dtype != want.dtype:
        return [
            f"{path}: {got.dtype} {tuple(got.shape)} instead of {want.dtype} {tuple(want.shape)}"
        ]
    tolerance = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": RTOL, "atol": ATOL}
    is_close = torch.isclose(got, want, equal_nan=True, **tolerance)
    if bool(is_close.all()):
        return []
    wrong = int((~is_close).sum())
    gap = (got.double() - want.double()).abs().nan_to_num(math.inf, math.inf).max().item()
    line = f"{path}: {wrong} of {want.numel()} elements differ, by up to {gap:.3e}"
    return [f"{line} ({_brief(got)} instead of {_brief(want)})" if want.numel() < 4 else line]


def _mapping_differences(got: Any, want: Mapping[Any, Any], exact: bool, path: str) -> list[str]:
    if not isinstance(got, Mapping):
        return [f"{path}: {_brief(got)} instead of a mapping"]
    lines = [f"{path}.{key}: missing" for key in want if key not in got]
    lines += [f"{path}.{key}: not expected" for key in got if key not in want]
    for key in want:
        if key in got:
            lines += differences(got[key], want[key], exact=exact, path=f"{path}.{key}")
    return lines


def _brief(value: Any) -> str:
    text = repr(value.tolist() if isinstance(value, Tensor) else value)
    return text if len(text) < 80 else f"{text[:77]}..."
