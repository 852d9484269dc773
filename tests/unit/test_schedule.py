"""The prediction of what is used next."""

from __future__ import annotations

from itertools import islice

from lightning_zero.engine.schedule import Schedule


def run(schedule: Schedule[str], forward: str, backward: str = "") -> list[list[str]]:
    """Use the items and return what was predicted after each use."""
    schedule.restart()
    predicted = []
    for is_backward, items in ((False, forward), (True, backward)):
        for item in items:
            if schedule.use(item, is_backward):
                predicted.append(list(islice(schedule.upcoming(), 2)))
    return predicted


def test_the_second_step_is_predicted_from_the_first() -> None:
    schedule: Schedule[str] = Schedule()
    run(schedule, "abcd", "dcba")
    assert run(schedule, "abcd", "dcba") == [
        ["b", "c"], ["c", "d"], ["d", "d"], ["d", "c"], ["c", "b"], ["b", "a"], ["a"], [],
    ]  # fmt: skip


def test_repeated_use_of_one_item_counts_once() -> None:
    schedule: Schedule[str] = Schedule()
    run(schedule, "aaab")
    assert run(schedule, "aab") == [["b"], []]


def test_an_item_used_in_two_places_is_told_apart_by_what_came_before() -> None:
    schedule: Schedule[str] = Schedule()
    run(schedule, "axbxc")
    assert run(schedule, "axbxc") == [["x", "b"], ["b", "x"], ["x", "c"], ["c"], []]


def test_a_changed_order_is_learned_and_cycles_end() -> None:
    schedule: Schedule[str] = Schedule()
    run(schedule, "abc")
    run(schedule, "acb")
    assert run(schedule, "acb")[0] == ["c", "b"]
    run(schedule, "ababababab")
    assert len(list(schedule.upcoming())) <= 4
