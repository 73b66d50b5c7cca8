"""Profiles and plans as text: what is written is read back, and anything else gets a sentence."""

import json
from dataclasses import replace

import pytest

from mimatrix.collectives.shares import Shares
from mimatrix.core.errors import UserError
from mimatrix.planner.curve import Curve
from mimatrix.planner.plan import LeftOut, Part, Plan
from mimatrix.planner.profile import Communication, Measurements, ModelSize, Profile
from mimatrix.planner.split import Split

MODEL = ModelSize("abc", "net", 100, 400, 401, 800, 64)
PROFILE = Profile(
    "cpu", "abc", Curve(((1, 0.1), (4, 0.3))), Curve(((1, 10.0), (4, 40.0))), 5000, 0.01, (0.0, 0.1, 0.2, 0.3), 0.05
)
MEASURED = Measurements(MODEL, (PROFILE, PROFILE.slowed(2)), Communication.of(0.3, 0.1, 0.2, "tuned"), True)
PLAN = Plan(
    1,
    Split(((3, 2), ())),
    Shares((0.75, 0.25)),
    (Part("a", 0.4, 0.0, 900, 5000), Part("b", 0.1, 0.3, 700, 5000)),
    0.7,
    0.3,
    ("because",),
    (LeftOut("c", "slow"),),
    0.001,
    "abc",
    3,
)


def test_measurements_come_back() -> None:
    assert Measurements.from_text(MEASURED.to_text()) == MEASURED


def test_plans_come_back() -> None:
    assert Plan.from_text(json.dumps(PLAN.to_json())) == PLAN
    assert PLAN.global_batch == 5
    assert PLAN.samples_per_s == pytest.approx(5 / 0.7)
    assert PLAN.idle == pytest.approx(0.3 / (2 * 0.7))
    assert PLAN.following(4).version == 4


@pytest.mark.parametrize("text", ["", "[]", "{}", '"x"', "3"])
def test_other_text_is_no_profile_and_no_plan(text: str) -> None:
    with pytest.raises(UserError, match=r"p\.json is no profile; make one with `mimatrix profile script\.py`"):
        Measurements.from_text(text, "p.json")
    with pytest.raises(UserError, match=r"p\.json is no plan; make one with `mimatrix plan --output plan\.json`"):
        Plan.from_text(text, "p.json")


@pytest.mark.parametrize("lost", ["model", "profiles", "communication"])
def test_a_damaged_profile_gets_a_sentence(lost: str) -> None:
    fields = json.loads(MEASURED.to_text())
    del fields[lost]
    with pytest.raises(UserError, match=f"damaged .*{lost}.*; measure again"):
        Measurements.from_text(json.dumps(fields))
    with pytest.raises(UserError, match="version 99"):
        Measurements.from_text(json.dumps(fields | {"mimatrix_profile": 99}))


@pytest.mark.parametrize("lost", ["stage", "micro", "shares", "ranks"])
def test_a_damaged_plan_gets_a_sentence(lost: str) -> None:
    fields = PLAN.to_json()
    del fields[lost]
    with pytest.raises(UserError, match=f"damaged .*{lost}.*; make it again"):
        Plan.from_text(json.dumps(fields))
    with pytest.raises(UserError, match="version 99"):
        Plan.from_text(json.dumps(fields | {"mimatrix_plan": 99}))


def test_what_a_rank_keeps_in_each_stage() -> None:
    whole = 400 + 401 + 800
    assert [MODEL.kept_bytes(stage, 1.0) for stage in range(4)] == [whole, whole, whole + 192, whole + 384]
    assert [MODEL.kept_bytes(stage, 0.0) for stage in range(4)] == [whole, 801, 400 + 192, 384]
    assert MODEL.kept_bytes(3, 0.25) == 384 + 400


def test_a_slowed_device_takes_longer_in_everything_it_computes() -> None:
    slow = PROFILE.slowed(3)
    assert slow.seconds.at(4) == pytest.approx(0.9)
    assert slow.optimizer_s == pytest.approx(0.03)
    assert slow.handling_s == pytest.approx((0.0, 0.3, 0.6, 0.9))
    assert replace(slow, seconds=PROFILE.seconds, optimizer_s=0.01, handling_s=PROFILE.handling_s) == PROFILE


def test_what_each_stage_moves() -> None:
    paid = Communication.of(0.3, 0.1, 0.2)
    assert paid.once_s == pytest.approx((0.3, 0.3, 0.2, 0.0))
    assert paid.round_s == pytest.approx((0.0, 0.0, 0.1, 0.5))
