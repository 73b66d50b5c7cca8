"""Rounds that sum to the samples in the least time: exactly for small numbers, within its own bound for large ones."""

from itertools import accumulate

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimatrix.planner.search.coarse_dp import CoarseDp
from mimatrix.planner.search.independent import ExactDp, best_rates, least_times
from mimatrix.planner.search.lockstep import shortest_rounds

steps = st.lists(st.integers(0, 30), min_size=1, max_size=25)


def least_by_trying(times: list[float], samples: int) -> float:
    """For each number of samples, the best last round after the best way to what it leaves."""
    known = [0.0]
    for wanted in range(1, samples + 1):
        known.append(min(known[max(0, wanted - size)] + time for size, time in enumerate(times, start=1)))
    return known[samples]


@settings(deadline=None)
@given(steps, st.integers(1, 100), st.integers(1, 300))
def test_small_numbers_are_exact(steps: list[int], first: int, samples: int) -> None:
    times = list(accumulate([float(first), *map(float, steps)]))
    found = shortest_rounds(np.array(times), samples)
    taken = sum(times[size - 1] for size in found.sizes)
    assert sum(found.sizes) >= samples
    assert abs(taken - least_by_trying(times, samples)) < 1e-9 * taken
    assert found.bound_s <= taken * (1 + 1e-12)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 1 << 30), st.integers(2_000, 30_000), st.integers(20_000, 2_000_000))
def test_large_numbers_are_near_their_bound(seed: int, width: int, samples: int) -> None:
    draw = np.random.default_rng(seed)
    times = np.cumsum(draw.uniform(0, 1, width) ** 4) + draw.uniform(1, 2_000)
    found = shortest_rounds(times, samples)
    taken = float(sum(times[size - 1] for size in found.sizes))
    assert sum(found.sizes) >= samples
    # So many micro-batches are a whole number: one more begins where the bound has a part of one.
    assert found.bound_s <= taken * (1 + 1e-12) <= found.bound_s * 1.02 + times[0]


@settings(deadline=None)
@given(st.integers(0, 1 << 30), st.integers(2, 40), st.integers(1, 3_000))
def test_micro_batches_are_cut_to_the_time_that_was_promised(seed: int, width: int, samples: int) -> None:
    draw = np.random.default_rng(seed)
    seconds = np.concatenate((np.zeros((3, 1)), np.cumsum(draw.integers(0, 5, (3, width)) + 0.25, axis=1)), axis=1)
    shortest = ExactDp(seconds, np.full(3, samples))
    for row, cut in enumerate(shortest.cut(np.arange(3), np.full(3, samples))):
        assert sum(cut) == samples
        assert abs(seconds[row, list(cut)].sum() - shortest.times[samples, row]) < 1e-9 * samples


def wide_rows(seed: int, width: int) -> np.ndarray:
    """Return a straight row with a fixed part, one with steps, and one that gets dear and has a cap."""
    draw = np.random.default_rng(seed)
    sizes = np.arange(width + 1)
    straight = draw.uniform(0, width) + sizes
    stepped = np.cumsum(draw.uniform(0, 1, width + 1) ** 6)
    dear = draw.uniform(0, 100) + sizes ** draw.uniform(1.0, 1.5)
    dear[draw.integers(1, width) :] = np.inf
    rows = np.stack([straight, stepped + draw.uniform(0, 50), dear])
    rows[:, 0] = 0.0
    return rows


@settings(deadline=None, max_examples=25)
@given(
    st.integers(0, 1 << 30), st.integers(300, 900), st.integers(1, 20_000), st.floats(0, 1), st.sampled_from([1, 12])
)
def test_wide_rows_are_bounded_from_both_sides(seed: int, width: int, most: int, part: float, times: int) -> None:
    """The exact table lies between, so neither side promises too much, nor do the cuts."""
    seconds = np.tile(wide_rows(seed, width), (times, 1))
    rows, most = np.arange(len(seconds)), min(most, 3 * width) if times > 1 else most
    exact, rough = _exact(seconds, most), _rough(seconds, most)
    goal = np.maximum(1, (part * exact.lengths).astype(np.int64))
    limits = exact.times[goal, rows]
    known = np.minimum(exact.samples_within(limits), most)
    assert (rough.samples_within(limits) <= known).all()
    assert (known <= rough.max_samples_within(limits)).all()
    for row, cut in enumerate(rough.cut(rows, goal)):
        assert sum(cut) == goal[row]
        assert list(cut) == sorted(cut, reverse=True)
        assert seconds[row, list(cut)].sum() >= limits[row] * (1 - 1e-12)


@pytest.mark.parametrize("seed", range(6))
def test_of_very_wide_rows_both_sides_are_within_a_percent(seed: int) -> None:
    draw = np.random.default_rng(seed)
    most = int(draw.integers(2_000, 15_000))
    seconds = wide_rows(seed, 4_000)[[0, 2]]
    exact, rough = _exact(seconds, most), _rough(seconds, most)
    goal = draw.integers(most // 2, most, 2)
    limits = exact.times[goal, np.arange(2)]
    assert (goal <= rough.samples_within(limits * 1.01)).all()
    assert (rough.max_samples_within(limits * 0.99) < np.maximum(goal, exact.samples_within(limits * 0.99) + 1)).all()
    for row, cut in enumerate(rough.cut(np.arange(2), goal)):
        assert seconds[row, list(cut)].sum() <= limits[row] * 1.01


def _exact(seconds: np.ndarray, most: int) -> ExactDp:
    return ExactDp(seconds, np.full(len(seconds), most))


def _rough(seconds: np.ndarray, most: int) -> CoarseDp:
    return CoarseDp(seconds, np.full(len(seconds), most), *best_rates(seconds))


def test_who_gets_no_samples_has_no_micro_batches() -> None:
    seconds = wide_rows(0, 400)
    assert _rough(seconds, 500).cut(np.arange(3), np.array([0, 1, 500]))[:2] == [(), (1,)]


def test_only_what_is_too_much_work_is_not_exact() -> None:
    straight = np.arange(16_385.0)[None] + 5
    straight[:, 0] = 0.0
    assert isinstance(least_times(straight, np.array([9_000])), ExactDp)
    assert isinstance(least_times(np.repeat(straight, 3, axis=0), np.full(3, 9_000)), CoarseDp)
