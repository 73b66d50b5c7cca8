"""Speeds of devices: by kind, and as an earlier run saw them."""

import pytest

from mimatrix.planner.model.curve import Curve
from mimatrix.planner.model.profile import Profile
from mimatrix.scheduler.device_speeds import speed_of_kind, speeds_measured, speeds_planned


@pytest.mark.parametrize(
    ("faster", "slower"),
    [
        ("NVIDIA H200", "NVIDIA A100-SXM4-80GB"),
        ("NVIDIA A40", "NVIDIA GeForce RTX 3090"),
        ("NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 2080 Ti"),
        ("an unheard-of GPU", "cpu"),
    ],
)
def test_kinds_in_their_order(faster: str, slower: str) -> None:
    assert speed_of_kind(faster) > speed_of_kind(slower)


def test_what_an_earlier_plan_saw() -> None:
    parts = [{"name": "A40", "busy_s": 0.5}, {"name": "cpu", "busy_s": 0.4}, {"name": "cpu", "busy_s": 0.5}]
    plan = {"parts": parts, "split": [[60, 40], [4], [10]]}
    assert speeds_planned(plan) == {"A40": 200.0, "cpu": 20.0}
    assert speeds_planned({}) == speeds_planned({"parts": 3, "split": None}) == {}


def test_what_curves_of_an_earlier_run_say() -> None:
    def profile(device: str, *points: tuple[int, float]) -> dict[str, object]:
        curve, memory = Curve.of(points), Curve.of((samples, 1e6 * samples) for samples, _ in points)
        return Profile(device, "m", curve, memory, 1 << 30, 0.001).to_json()

    slow, fast = profile("cpu", (1, 0.1), (8, 0.4)), profile("A40", (1, 0.1), (100, 0.5))
    assert speeds_measured({"profiles": [slow, fast, slow]}) == pytest.approx({"cpu": 20.0, "A40": 200.0})
    assert speeds_measured({}) == speeds_measured({"profiles": [{"device": 3}]}) == {}


def test_a_plan_that_was_made_for_a_cluster_counts_by_its_device_kinds() -> None:
    """Its names are places, such as `pair/0 3090`, and no request asks for those."""
    plan = {"parts": [{"name": "pair/0 3090", "device": "RTX 3090", "busy_s": 0.5}], "split": [[50]]}
    assert speeds_planned(plan) == {"RTX 3090": 100.0}


@pytest.mark.parametrize(
    "plan",
    [
        {"parts": [{"name": "cpu", "busy_s": 0.5}], "split": [[10**400]]},
        {"parts": [{"name": "cpu", "busy_s": 10**400}], "split": [[1]]},
        {"parts": [{"name": "cpu", "busy_s": 1e-300}], "split": [[10**9]]},
        {"parts": [{"name": ["cpu"], "busy_s": 0.5}], "split": [[1]]},
        {"parts": [{"name": "x" * 10_000, "busy_s": 0.5}], "split": [[1]]},
        {"parts": [7], "split": [[1]]},
        {"parts": {"a": 1}, "split": [[1]]},
        {"parts": [{"name": "cpu", "busy_s": 0.5}], "split": [[-5]]},
    ],
)
def test_a_plan_that_is_out_of_bounds_says_nothing(plan: dict[str, object]) -> None:
    assert speeds_planned(plan) == {}
