"""Checkpoints of other systems: nothing is lost, nothing is executed, what is wrong is named."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from lightning_zero.checkpoint.failures import CheckpointError, CorruptCheckpointError
from lightning_zero.checkpoint.foreign import foreign_kind, read_foreign
from tests.support.compare import assert_same
from tests.support.deepspeed_folder import FILLING, Run

HALF = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def values(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def make_run(**options: Any) -> Run:
    """Odd sizes, one that spans three ranks, a scalar; two groups, frozen, tied, buffers."""
    return Run(
        [
            {"emb.weight": values(7, 5), "a.weight": values(3, 1, 3), "scalar": values()},
            {"a.bias": values(5), "one": values(1), "none": values(0, 4), "b": values(2, 11)},
        ],
        frozen={"frozen.weight": values(5, 3), "frozen.bias": values(3)},
        buffers={"mean": values(4), "count": torch.tensor(12)},
        **{"tied": {"head.weight": "emb.weight"}, **options},
    )


def check(run: Run, folder: Path) -> dict[str, Any]:
    """Assert that all of a run comes back; returns what was read."""
    checkpoint = read_foreign(folder)
    weights = run.params | {n: w.to(run.dtype) for n, w in run.frozen.items()} | run.buffers
    weights |= {name: weights[origin] for name, origin in run.tied.items()}
    assert_same(checkpoint["state_dict"], weights, exact=True, label="weights")
    for name, origin in run.tied.items():
        assert checkpoint["state_dict"][name] is checkpoint["state_dict"][origin]
    (optimizer,) = checkpoint["optimizer_states"]
    order = [name for group in run.groups for name in group]
    for index, name in enumerate(order):
        state = {key: run.state[key][name] for key in run.state} | {"step": torch.tensor(7.0)}
        if run.params[name].numel():
            assert_same(optimizer["state"][index], state, exact=True, label=name)
    start, groups = 0, []
    for index, group in enumerate(run.groups):
        params = list(range(start, start := start + len(group)))
        groups.append(
            {"lr": 0.1 * (index + 1), "betas": (0.9, 0.99), "eps": 1e-8, "params": params}
        )
    assert optimizer["param_groups"] == groups
    return checkpoint


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_weights_and_optimizer_come_back(
    tmp_path: Path, stage: int, ranks: int, dtype: str
) -> None:
    beside = {
        "epoch": 3,
        "global_step": 7,
        "loops": {"a": [1]},
        "hyper_parameters": {"x": (1, "y")},
    }
    run = make_run(stage=stage, ranks=ranks, dtype=HALF[dtype], beside=beside)
    run.save(tmp_path)
    assert foreign_kind(tmp_path) == "deepspeed"
    checkpoint = check(run, tmp_path)
    assert {key: checkpoint[key] for key in beside} == beside
    own = {"state_dict", "optimizer_states", "lr_schedulers", "pytorch-lightning_version"}
    assert checkpoint.keys() == beside.keys() | own


@pytest.mark.parametrize(
    "options",
    [
        {"stage": 2, "round_robin": True, "ranks": 3},
        {"stage": 1, "round_robin": True},
        {"stage": 2, "gap": 3, "ranks": 3},
        {"stage": 2, "gap": 3, "ranks": 2},
        {"stage": 3, "sub_groups": True, "ranks": 3},
        {"stage": 2, "fused": True},
        {"stage": 3, "fused": True, "prefix": "_forward_module."},
        {"stage": 1, "prefix": "_forward_module."},
        {"stage": 2, "ranks": 25},
        {"stage": 3, "ranks": 25},
    ],
    ids=str,
)
def test_variants_of_the_layout(tmp_path: Path, options: dict[str, Any]) -> None:
    run = make_run(**options)
    run.save(tmp_path)
    check(run, tmp_path)


@given(
    groups=st.lists(
        st.lists(st.lists(st.integers(0, 5), max_size=3), min_size=1, max_size=4),
        min_size=1,
        max_size=3,
    ),
    stage=st.sampled_from([1, 2, 3]),
    ranks=st.integers(1, 5),
)
def test_any_shapes(groups: list[list[list[int]]], stage: int, ranks: int) -> None:
    run = Run(
        [{f"{i}.{j}": values(*s, seed=j) for j, s in enumerate(g)} for i, g in enumerate(groups)],
        stage=stage,
        ranks=ranks,
    )
    with tempfile.TemporaryDirectory() as folder:
        run.save(Path(folder))
        check(run, Path(folder))


def test_the_optimizer_for_bf16_names_no_stage_and_saves_filled_masters(tmp_path: Path) -> None:
    run = make_run(stage=1, ranks=3)

    def change(rank: int, part: dict[str, Any]) -> None:
        del part["zero_stage"], part["loss_scaler"]
        masters = [run.cut(list(group), run.params, lean=False)[rank] for group in run.groups]
        assert rank < 2 or FILLING in masters[0]
        part["single_partition_of_fp32_groups"] = masters

    run.change = change
    run.save(tmp_path)
    check(run, tmp_path)


def test_without_zero_the_model_file_has_it_all(tmp_path: Path) -> None:
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(3)).sum().backward()
    optimizer.step()
    content = {
        "module": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "param_shapes": None,
    }
    torch.save(content, tmp_path / "mp_rank_00_model_states.pt")
    checkpoint = read_foreign(tmp_path)
    assert_same(checkpoint["state_dict"], dict(net.state_dict()), exact=True, label="weights")
    (saved,) = checkpoint["optimizer_states"]
    assert_same(saved, optimizer.state_dict(), exact=True, label="optimizer")


def test_tensors_without_elements_are_not_taken_for_tied_ones(tmp_path: Path) -> None:
    # DeepSpeed compares addresses, and theirs is 0.
    run = make_run(stage=1, beside={"shared_params": {"frozen.none": "frozen.empty"}}, tied={})
    run.frozen = {"frozen.empty": values(0), "frozen.none": values(3, 0)}
    run.save(tmp_path)
    check(run, tmp_path)


def test_frozen_weights_may_be_left_out(tmp_path: Path) -> None:
    beside = {"frozen_param_shapes": None, "frozen_param_fragments": None}
    run = make_run(stage=3, beside=beside)
    run.frozen = {}
    run.save(tmp_path)
    check(run, tmp_path)


def test_a_weight_that_deepspeed_has_not_saved_is_named(tmp_path: Path) -> None:
    run = make_run(stage=3)
    run.beside = {"module": run.model_part(0)["module"] | {"extra": torch.empty(0)}}
    run.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"has no values of 'extra'"):
        read_foreign(tmp_path)


def test_the_folder_may_be_given_with_or_without_the_tag(tmp_path: Path) -> None:
    run = make_run()
    inner = run.save(tmp_path, tag="global_step7")
    check(run, inner)
    check(run, tmp_path)
    (tmp_path / "latest").write_text("../elsewhere")
    with pytest.raises(CheckpointError, match=r"latest' names the checkpoint '\.\./elsewhere'"):
        foreign_kind(tmp_path)
    inner.rename(tmp_path / "checkpoint")
    (tmp_path / "latest").unlink()
    check(run, tmp_path)


@pytest.mark.parametrize("stage", [2, 3])
def test_progress_ends_with_everything(tmp_path: Path, stage: int) -> None:
    make_run(stage=stage).save(tmp_path)
    calls: list[tuple[int, int]] = []
    read_foreign(tmp_path, progress=lambda *call: calls.append(call))
    assert calls == sorted(calls)
    assert calls[-1][0] == calls[-1][1] >= 3 * 4 * 70


# ---- what is wrong


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_missing_rank_is_named(tmp_path: Path, stage: int, rank: int) -> None:
    inner = make_run(stage=stage, ranks=3).save(tmp_path)
    name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
    (inner / name).unlink()
    expected = "3 ranks, but .* has 2 files like" if rank == 2 else f"missing in '.*': '{name}'"
    with pytest.raises(CheckpointError, match=expected):
        read_foreign(tmp_path)


def test_missing_model_and_optimizer_files(tmp_path: Path) -> None:
    inner = make_run(stage=3, ranks=2).save(tmp_path / "a")
    (inner / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"2 ranks, but .* has 1 files like 'zero_pp_rank_0"):
        read_foreign(tmp_path / "a")
    inner = make_run().save(tmp_path / "b")
    for path in inner.glob("*_optim_states.pt"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"has no `\*zero_pp_rank_\*_optim_states.pt`"):
        read_foreign(tmp_path / "b")


def test_files_of_different_runs(tmp_path: Path) -> None:
    for stage in (1, 3):
        a, b = tmp_path / f"a{stage}", tmp_path / f"b{stage}"
        inner = make_run(stage=stage).save(a)
        Run([{"x": values(9)}, {"y": values(2)}], stage=stage).save(b)
        for rank in (0, 1):
            name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            shutil.copy(b / "checkpoint" / name, inner / name)
        with pytest.raises(CorruptCheckpointError, match=r"elements"):
            read_foreign(a)
    (inner / "zero_pp_rank_0_mp_rank_00_optim_states.pt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"of the same rank: two checkpoints"):
        read_foreign(a)


def test_a_shorter_state_and_a_later_stage(tmp_path: Path) -> None:
    def shorten(rank: int, part: dict[str, Any]) -> None:
        state = part["base_optimizer_state"]["state"][1]
        state["exp_avg_sq"] = state["exp_avg_sq"][: 3 if rank else None]

    make_run(change=shorten).save(tmp_path / "a")
    expected = r"rank_1_mp_rank_00_optim_states.pt' has no 'exp_avg_sq', or a shorter one, .* 'b'"
    with pytest.raises(CorruptCheckpointError, match=expected):
        read_foreign(tmp_path / "a")
    make_run(change=lambda rank, part: part.update(zero_stage=4)).save(tmp_path / "b")
    with pytest.raises(CheckpointError, match=r"is of ZeRO stage 4, .* `zero_to_fp32.py`"):
        read_foreign(tmp_path / "b")


def test_an_elastic_checkpoint_has_weights_only(tmp_path: Path) -> None:
    run = make_run(change=lambda rank, part: part.update(base_optimizer_state=[{}, {}]))
    run.save(tmp_path)
    with pytest.raises(CheckpointError, match=r"does not have the options of the optimizer"):
        read_foreign(tmp_path)
    weights = read_foreign(tmp_path, weights_only=True)["state_dict"]
    assert torch.equal(weights["emb.weight"], run.params["emb.weight"])


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("layer_01-model_00-model_states.pt", "pipeline"),
        ("layer_0_expert_1_mp_rank_00_model_states.pt", "mixtures of experts"),
        ("mp_rank_01_model_states.pt", "tensor"),
    ],
)
def test_other_parallelisms_are_refused(tmp_path: Path, name: str, what: str) -> None:
    inner = make_run().save(tmp_path)
    (inner / name).touch()
    with pytest.raises(CheckpointError, match=f"{name}' belongs to a model with {what}"):
        read_foreign(tmp_path)


def test_damaged_and_empty(tmp_path: Path) -> None:
    inner = make_run().save(tmp_path / "run")
    path = inner / "mp_rank_00_model_states.pt"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CorruptCheckpointError, match=r"mp_rank_00_model_states.pt' is damaged"):
        read_foreign(tmp_path / "run")
    torch.save({"module": 3}, path)
    with pytest.raises(CheckpointError, match=r"has no weights under 'module'"):
        read_foreign(tmp_path / "run")
    torch.save({"module": {}, "param_shapes": [{"a": "b"}, {}]}, path)
    with pytest.raises(CheckpointError, match=r"model_states|not laid out like"):
        read_foreign(tmp_path / "run")
    (path.parent / "manifest.json").touch()
    assert foreign_kind(path.parent) is None
    with pytest.raises(CheckpointError, match=r"is a checkpoint of lightning_zero"):
        read_foreign(path.parent)
    (tmp_path / "nothing").mkdir()
    assert foreign_kind(tmp_path / "nothing") is None
    assert foreign_kind(tmp_path / "not there") is None
    with pytest.raises(CheckpointError, match=r"nothing to convert: .*DeepSpeed.*FSDP"):
        read_foreign(tmp_path / "nothing")
