"""The rules of the house that a machine can check."""

from __future__ import annotations

import ast
import re
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "lightning_zero"
# room -> rooms that it may import
ALLOWED = {
    "errors": set(),
    "pending": set(),
    "config": set(),
    "allocator": set(),
    "comm": {"errors", "pending"},
    "offload": {"errors", "pending"},
    "engine": {"comm", "config", "errors", "offload", "pending"},
    "checkpoint": {"comm", "engine", "errors", "pending"},
    "loss_scale": {"engine", "errors"},
    "precision": {"config", "engine", "loss_scale"},
    "offload_devices": {"comm", "config", "engine", "errors", "offload"},
    "offloading": {"checkpointing", "config", "engine", "offload_devices"},
    "callbacks": {"config", "engine", "strategy"},
    "checkpointing": {
        "checkpoint",
        "comm",
        "config",
        "endings",
        "engine",
        "errors",
        "precision",
    },
    "endings": {"comm", "engine", "errors"},
    "strategy": {
        "allocator",
        "comm",
        "config",
        "engine",
        "errors",
        "offload_devices",
        "offloading",
        "precision",
    },
    "cli": {"checkpoint"},
    "registration": {"strategy"},
    "__init__": {
        "callbacks",
        "checkpoint",
        "engine",
        "errors",
        "precision",
        "registration",
        "strategy",
    },
}
COLLECTIVES = re.compile(
    r"\b(all_gather|all_reduce|reduce_scatter|broadcast|isend|irecv|barrier|all_to_all)\w*$"
)


def sources() -> list[tuple[str, Path, ast.Module]]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(PACKAGE)
        room = relative.parts[0] if len(relative.parts) > 1 else relative.stem
        found.append((room, path, ast.parse(path.read_text())))
    return found


def imports(tree: ast.Module) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            # `from package import name` may import a room by its name
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_imports_point_down() -> None:
    for room, path, tree in sources():
        ours = {name for name in imports(tree) if name.startswith("lightning_zero.")}
        rooms = {name.split(".")[1] for name in ours} - {room}
        assert rooms <= ALLOWED[room], f"{path} imports {rooms - ALLOWED[room]}"


def test_the_engine_and_comm_know_nothing_of_lightning() -> None:
    for room, path, tree in sources():
        if room in ("engine", "comm", "offload", "errors", "pending", "config", "allocator"):
            foreign = {name for name in imports(tree) if name.split(".")[0] == "lightning"}
            assert not foreign, path


def test_only_comm_calls_collectives_of_torch() -> None:
    for room, path, tree in sources():
        if room == "comm":
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                owner = ast.unparse(node.func.value)
                is_torch = owner in ("dist", "torch.distributed")
                assert not (is_torch and COLLECTIVES.search(node.func.attr)), (
                    f"{path}:{node.lineno}"
                )


def test_a_stage_is_never_compared() -> None:
    for _, path, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, ast.Compare):
                compared = {
                    ast.unparse(side).split(".")[-1] for side in (node.left, *node.comparators)
                }
                is_validation = path.name == "config.py"
                assert "stage" not in compared or is_validation, f"{path}:{node.lineno}"


def test_files_and_functions_stay_within_the_budget() -> None:
    for _, path, tree in sources():
        assert len(path.read_text().splitlines()) <= 500, path
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                assert (node.end_lineno or 0) - node.lineno < 80, f"{path}:{node.lineno}"
