"""Rounds that sum to the samples in the least time: exactly for small numbers, within its own bound for large ones."""

from itertools import accumulate

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mimatrix.planner.micro_steps import Shortest
from mimatrix.planner.rounds import fewest_seconds

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
    found = fewest_seconds(np.array(times), samples)
    taken = sum(times[size - 1] for size in found.sizes)
    assert sum(found.sizes) >= samples
    assert abs(taken - least_by_trying(times, samples)) < 1e-9 * taken
    assert found.bound_s <= taken * (1 + 1e-12)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 1 << 30), st.integers(2_000, 30_000), st.integers(20_000, 2_000_000))
def test_large_numbers_are_near_their_bound(seed: int, width: int, samples: int) -> None:
    draw = np.random.default_rng(seed)
    times = np.cumsum(draw.uniform(0, 1, width) ** 4) + draw.uniform(1, 2_000)
    found = fewest_seconds(times, samples)
    taken = float(sum(times[size - 1] for size in found.sizes))
    assert sum(found.sizes) >= samples
    # So many micro-batches are a whole number: one more begins where the bound has a part of one.
    assert found.bound_s <= taken * (1 + 1e-12) <= found.bound_s * 1.02 + times[0]


@settings(deadline=None)
@given(st.integers(0, 1 << 30), st.integers(2, 40), st.integers(1, 3_000))
def test_micro_batches_are_cut_to_the_time_that_was_promised(seed: int, width: int, samples: int) -> None:
    draw = np.random.default_rng(seed)
    seconds = np.concatenate((np.zeros((3, 1)), np.cumsum(draw.integers(0, 5, (3, width)) + 0.25, axis=1)), axis=1)
    shortest = Shortest(seconds, np.full(3, samples))
    for row, cut in enumerate(shortest.cut(np.arange(3), np.full(3, samples))):
        assert sum(cut) == samples
        assert abs(seconds[row, list(cut)].sum() - shortest.times[samples, row]) < 1e-9 * samples
