"""Who does not come to a collective."""

from dataclasses import replace

from mimatrix.monitor.hangs import ASIDE_S, LATE_S, find_hang
from mimatrix.monitor.rank_metrics import Awaited, RankFigures


def rank(number: int, waits_for: int | None = -1, seconds: float = LATE_S, at_s: float = 100.0) -> RankFigures:
    awaited = None if waits_for == -1 else Awaited("all_reduce of 10 float32 (sum, gdraa)", 1, waits_for, seconds)
    return RankFigures(number, f"host{number}/0", at_s, 120, 0.1, 0.1, awaited=awaited)


def test_one_sentence() -> None:
    found = find_hang([rank(0, 2, 10.0), rank(1, 2, 11.0), rank(2, at_s=90.0)])
    assert found
    assert found.describe() == (
        "rank 2 on host2/0 has not entered all_reduce of 10 float32 (sum, gdraa), round 1, in step 120 for 11s; "
        "ranks 0, 1 wait for it"
    )


def test_who_waits_himself_is_not_blamed() -> None:
    found = find_hang([rank(0, 1), rank(1, 2), rank(2)])
    assert found
    assert (found.rank, found.waits) == (2, (0, 1))


def test_between_hosts_nobody_knows_whom_he_waits_for() -> None:
    found = find_hang([rank(0, None), rank(1, at_s=88.0), rank(2, None)])
    assert found
    assert (found.rank, found.waits) == (1, (0, 2))


def test_who_was_stopped_while_it_waited_for_a_moment_is_named() -> None:
    """Its last word was that it waits; it has said nothing since."""
    found = find_hang([rank(0, 1, LATE_S), rank(1, 0, 0.1, at_s=100.0 - LATE_S)])
    assert found
    assert (found.rank, found.waits) == (1, (0,))
    assert find_hang([rank(0), rank(1, 0, 0.1, at_s=60.0), rank(2)]) is None  # reports were lost, and nobody waits


def test_evaluating_may_take_longer() -> None:
    aside = [replace(each, aside=True) for each in (rank(0, 1, 3 * LATE_S), rank(1))]
    assert find_hang(aside) is None
    assert find_hang([replace(each, aside=True) for each in (rank(0, 1, ASIDE_S), rank(1))])


def test_all_wait_for_a_moment_or_for_one_another() -> None:
    assert find_hang([rank(0, 1, 1.0), rank(1)]) is None
    assert find_hang([rank(0, 1), rank(1, 0)]) is None
    assert find_hang([]) is None
