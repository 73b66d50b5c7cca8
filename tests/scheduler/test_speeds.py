"""Speeds of devices: by kind, and as an earlier run saw them."""

import pytest

from mimatrix.scheduler.speeds import speed_of_kind, speeds_seen


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
    plan = {"ranks": parts, "micro": [[60, 40], [4], [10]]}
    assert speeds_seen(plan) == {"A40": 200.0, "cpu": 20.0}
    assert speeds_seen({}) == speeds_seen({"ranks": 3, "micro": None}) == {}
