"""What is kept of figures over time."""

import pytest

from mimatrix.monitor.downsampling import DAY_S, HOUR_S, TIERS, mean, tier_for


def test_means_by_name_and_by_rank() -> None:
    first = {
        "step": 1,
        "step_s": 0.2,
        "predicted_step_s": None,
        "metrics": {"loss": 2.0},
        "ranks": {"busy": [1.0, None]},
    }
    second = {"step": 5, "step_s": 0.4, "metrics": {"loss": 1.0, "accuracy": 0.5}, "ranks": {"busy": [0.0, 0.5]}}
    assert mean([first, second]) == {
        "step": 5,
        "step_s": pytest.approx(0.3),
        "predicted_step_s": None,
        "metrics": {"loss": 1.5, "accuracy": 0.5},
        "ranks": {"busy": [0.5, 0.5]},
    }


def test_means_of_means_are_means() -> None:
    points = [{"step_s": float(number)} for number in range(8)]
    halves = [mean(points[:4]), mean(points[4:])]
    assert mean(halves) == mean(points)


@pytest.mark.parametrize(("span_s", "tier"), [(600.0, 0), (HOUR_S, 1), (DAY_S, 2), (30 * DAY_S, 2)])
def test_the_finest_tier_that_is_not_too_fine(span_s: float, tier: int) -> None:
    assert tier_for(1e6 - span_s, 1e6, 1e6, 300) == tier


def test_what_has_ended_is_as_fine_as_it_is_kept() -> None:
    begun, ended = 1e6, 1e6 + HOUR_S / 2
    assert [tier_for(begun, ended, ended + later_s, 300) for later_s in (0, HOUR_S, 11 * HOUR_S, 4 * DAY_S)] == [
        0,
        0,
        1,
        2,
    ]


def test_a_month_of_ten_jobs_is_small() -> None:
    """What docs say of the size: rows of eight ranks take about 1,100 bytes with all that a table needs."""
    rows = 11 * sum(min(tier.kept_s, 31 * DAY_S) / tier.every_s for tier in TIERS)
    assert rows * 1100 < 1e9
