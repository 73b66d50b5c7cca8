"""Shares: exact sums, and the linear programme against closed forms and brute force."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimatrix.collectives import Shares, shares_by_bandwidth
from mimatrix.core.errors import UserError

WEIGHTS = st.lists(st.floats(0, 1e6), min_size=1, max_size=40).filter(lambda weights: sum(weights) > 0)


@given(WEIGHTS, st.integers(0, 10**12))
def test_cuts_sum_exactly_and_are_near_their_share(weights: list[float], count: int) -> None:
    shares = Shares.of(weights)
    parts = shares.cut(count)
    assert sum(parts) == count
    assert all(part >= 0 for part in parts)
    for part, fraction in zip(parts, shares.fractions, strict=True):
        assert abs(part - fraction * count) <= 1 + 1e-9 * count


@pytest.mark.parametrize("weights", [[], [0.0, 0.0], [-1.0, 2.0], [float("nan")], [float("inf"), 1.0]])
def test_refuses_weights_that_cannot_be_shares(weights: list[float]) -> None:
    with pytest.raises(UserError, match="write for example"):
        Shares.of(weights)


@pytest.mark.parametrize("fractions", [(0.5, 0.4), (1.5, -0.5), ()])
def test_refuses_fractions_that_do_not_sum_to_one(fractions: tuple[float, ...]) -> None:
    with pytest.raises(UserError):
        Shares(fractions)


def test_shares_of_ranks_spread_over_their_blocks() -> None:
    assert Shares.of([3, 1]).for_blocks((0, 1, 0, 1)).fractions == (0.375, 0.125, 0.375, 0.125)
    assert Shares.of([1, 1, 2]).for_blocks((2, 0)).fractions == pytest.approx((2 / 3, 1 / 3))


def seconds(fractions: list[float], rates: list[float], segments: int) -> float:
    """Return the cost of the pipeline, straight from the definition: first round, middle rounds, last round."""
    ranks = len(rates)
    ends = max(max(1 - f, f * (ranks - 1)) / rate for f, rate in zip(fractions, rates, strict=True))
    middle = max((1 + f * (ranks - 2)) / rate for f, rate in zip(fractions, rates, strict=True))
    return (2 * ends + (segments - 1) * middle) / segments


@pytest.mark.parametrize("segments", [1, 2, 4, 16, 64])
@pytest.mark.parametrize(
    ("fast", "slow", "ratio"), list(itertools.product([1, 2, 3, 6], [1, 2, 5], [1.0, 1.5, 4.0, 16.0]))
)
def test_two_kinds_of_nic_against_brute_force(fast: int, slow: int, ratio: float, segments: int) -> None:
    """With two kinds there is one unknown, the slow share, and the cost is convex in it: search it finely."""
    rates = [ratio] * fast + [1.0] * slow
    found = shares_by_bandwidth(rates, segments)
    assert found.seconds_per_byte == pytest.approx(seconds(list(found.shares.fractions), rates, segments), rel=1e-9)

    def cost(slow_share: float) -> float:
        return seconds([(1 - slow * slow_share) / fast] * fast + [slow_share] * slow, rates, segments)

    best = min(cost(step / 2_000 / slow) for step in range(2_001))
    assert found.seconds_per_byte <= best * (1 + 1e-9)
    assert found.seconds_per_byte >= best * (1 - 1e-2)


@pytest.mark.parametrize(("fast", "slow", "ratio"), list(itertools.product([1, 2, 4], [1, 2, 4], [2.0, 4.0, 16.0])))
def test_two_kinds_of_nic_in_closed_form(fast: int, slow: int, ratio: float) -> None:
    """With many segments the time tends to the larger of S / slow rate and 2(P-1)S / sum of rates."""
    ranks = fast + slow
    limit = max(1.0, 2 * (ranks - 1) / (fast * ratio + slow))
    found = shares_by_bandwidth([ratio] * fast + [1.0] * slow, 10**7)
    assert found.seconds_per_byte == pytest.approx(limit, rel=1e-6)


def test_one_segment_gives_the_slow_ones_equal_shares() -> None:
    for ratio in (1.5, 4.0, 16.0):
        fractions = shares_by_bandwidth([ratio, ratio, 1.0, 1.0], 1).shares.fractions
        assert fractions[2:] == pytest.approx((0.25, 0.25), rel=1e-9)


def test_says_why() -> None:
    assert "equal shares" in shares_by_bandwidth([1.0, 1.0], 8).reason
    assert "owns 0.0% instead of 25.0%" in shares_by_bandwidth([4.0, 4.0, 1.0, 1.0], 16).reason


@pytest.mark.parametrize(
    ("rates", "segments"), [([1.0], 1), ([1.0, 0.0], 1), ([1.0, float("inf")], 1), ([1.0, 1.0], 0)]
)
def test_refuses_rates_that_cannot_be(rates: list[float], segments: int) -> None:
    with pytest.raises(UserError):
        shares_by_bandwidth(rates, segments)
