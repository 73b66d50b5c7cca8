"""Who is slow, by figures that ranks report."""

import random
from dataclasses import replace

import pytest

from mimatrix.monitor.rank_metrics import RankFigures
from mimatrix.monitor.stragglers import PERSISTS_S, Straggler, StragglerCause, StragglerTracker, find_straggler


def ranks(*compute_s: float, **more: float) -> list[RankFigures]:
    step_s = max(compute_s) + 0.02
    return [
        RankFigures(rank, f"host{rank}/0", 0.0, 10, step_s, busy, waiting_s=step_s - busy, **more)  # type: ignore[arg-type]
        for rank, busy in enumerate(compute_s)
    ]


def at(second: float, figures: list[RankFigures]) -> list[RankFigures]:
    return [replace(each, at_s=float(second)) for each in figures]


def test_the_slow_rank_and_what_it_costs() -> None:
    found = find_straggler(ranks(0.1, 0.1, 0.2))
    assert found is not None
    assert (found.rank, found.device, found.cause) == (2, "host2/0", "compute")
    assert found.lost_s == pytest.approx(0.1)
    assert found.describe() == (
        "the others are idle because of rank 2 on host2/0: 100ms (45%) of every step; its compute takes longer; "
        'plan="profile" or "online" would give it less'
    )


@pytest.mark.parametrize(
    "compute_s", [(0.1, 0.1, 0.1), (0.1, 0.12, 0.11), (0.1,), (), (0.0, 0.1), (0.1, 0.2, 0.2, 0.2, 0.2, 0.2)]
)
def test_nobody_is_named_where_nobody_stands_out(compute_s: tuple[float, ...]) -> None:
    assert find_straggler(ranks(*compute_s) if compute_s else []) is None


def test_causes() -> None:
    figures = ranks(0.1, 0.1, 0.1)
    loads = [*figures[:2], replace(figures[2], data_s=0.1)]
    full = [*ranks(0.1, 0.1, 0.2)[:2], replace(ranks(0.1, 0.1, 0.2)[2], memory_full=0.99)]
    link = [
        RankFigures(0, "a/0", 0.0, 10, 1.0, 0.1, waiting_s=0.8, communication_s=0.1),
        RankFigures(1, "b/0", 0.0, 10, 1.0, 0.1, waiting_s=0.1, communication_s=0.8),
        RankFigures(2, "c/0", 0.0, 10, 1.0, 0.1, waiting_s=0.8, communication_s=0.1),
    ]
    found = [find_straggler(each) for each in (loads, full, link)]
    assert [(each.rank, each.cause) for each in found if each] == [(2, "loader"), (2, "memory"), (1, "link")]


def test_it_is_named_once_and_until_it_has_caught_up() -> None:
    following, said = StragglerTracker(), []
    for second in range(20):
        slow = 5 <= second < 15
        said.append(following.observe(float(second), at(second, ranks(0.1, 0.1, 0.2 if slow else 0.1))))
    assert [number for number, each in enumerate(said) if each] == [5 + PERSISTS_S]
    assert following.named is None


@pytest.mark.parametrize(("slow", "of"), [(2, 3), (2, 4), (2, 8), (4, 8), (5, 8)])
def test_several_slow_ranks_are_named_together_and_once(slow: int, of: int) -> None:
    chance, following, said = random.Random(0), StragglerTracker(), []
    for second in range(120):
        times = [(0.2 if rank >= of - slow else 0.1) * chance.uniform(0.98, 1.02) for rank in range(of)]
        found = following.observe(float(second), at(second, ranks(*times)))
        said += [found] if found else []
        assert following.named or second < PERSISTS_S + 1
    assert len(said) == 1
    assert {said[0].rank, *said[0].also} == set(range(of - slow, of))
    assert f" and {'rank' if slow == 2 else slow - 1}" in said[0].describe()


def test_the_first_steps_say_nothing() -> None:
    assert find_straggler([replace(each, step=2) for each in ranks(0.1, 9.0)]) is None


def test_one_slow_step_is_nothing_and_another_rank_begins_anew() -> None:
    following = StragglerTracker()
    for second in range(40):
        slow = [0.1, 0.1, 0.1]
        slow[second // 2 % 3] = 0.2
        assert following.observe(float(second), at(second, ranks(*slow))) is None


def test_no_false_alarm_in_an_hour_of_noise() -> None:
    chance, following = random.Random(1), StragglerTracker()
    for second in range(3600):
        noisy = [0.1 * chance.lognormvariate(0, 0.08) for _ in range(4)]
        assert following.observe(float(second), at(second, ranks(*noisy))) is None


def test_one_report_is_not_enough_however_long_it_is_the_last() -> None:
    following = StragglerTracker()
    for second in range(10):
        assert following.observe(float(second), at(second // 5, ranks(0.1, 0.1, 0.2))) is None


def test_what_will_be_done_about_it() -> None:
    assert "its batch will shrink" in Straggler(1, "a/1", 0.1, 0.5, StragglerCause.COMPUTE, follows=True).describe()
