"""Profiles and plans as text: what is written is read back, and anything else gets a sentence."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from mimatrix.collectives.shares import Shares
from mimatrix.core.errors import UserError
from mimatrix.planner.model.curve import Curve
from mimatrix.planner.model.plan import LeftOut, Plan, RankPlan, explain_misfit
from mimatrix.planner.model.profile import Communication, Measurements, ModelSize, Profile
from mimatrix.planner.model.split import Split

MODEL = ModelSize("abc", "net", 100, 400, 401, 800, 64)
PROFILE = Profile(
    "cpu", "abc", Curve(((1, 0.1), (4, 0.3))), Curve(((1, 10.0), (4, 40.0))), 5000, 0.01, (0.0, 0.1, 0.2, 0.3), 0.05
)
MEASURED = Measurements(MODEL, (PROFILE, PROFILE.slowed(2)), Communication.of(0.3, 0.1, 0.2, "tuned"), True)
PLAN = Plan(
    stage=1,
    split=Split(((3, 2), ())),
    shares=Shares((0.75, 0.25)),
    parts=(
        RankPlan(name="a", busy_s=0.4, idle_s=0.0, memory_bytes=900, room_bytes=5000),
        RankPlan(name="b", busy_s=0.1, idle_s=0.3, memory_bytes=700, room_bytes=5000),
    ),
    step_s=0.7,
    communication_s=0.3,
    reasons=("because",),
    left_out=(LeftOut("c", "slow"),),
    within=0.001,
    model="abc",
    version=3,
)


def test_measurements_come_back() -> None:
    assert Measurements.from_text(MEASURED.to_text()) == MEASURED


def test_plans_come_back() -> None:
    assert Plan.from_text(json.dumps(PLAN.to_json())) == PLAN
    assert PLAN.global_batch == 5
    assert PLAN.samples_per_s == pytest.approx(5 / 0.7)
    assert PLAN.idle == pytest.approx(0.3 / (2 * 0.7))
    assert PLAN.with_version(4).version == 4


@pytest.mark.parametrize("text", ["", "[]", "{}", '"x"', "3"])
def test_other_text_is_no_profile_and_no_plan(text: str) -> None:
    with pytest.raises(UserError, match=r"p\.json is not a profile; make one with `mimatrix profile script\.py`"):
        Measurements.from_text(text, "p.json")
    with pytest.raises(UserError, match=r"p\.json is not a plan; make one with `mimatrix plan --output plan\.json`"):
        Plan.from_text(text, "p.json")


@pytest.mark.parametrize("lost", ["model", "profiles", "communication"])
def test_a_damaged_profile_gets_a_sentence(lost: str) -> None:
    fields = json.loads(MEASURED.to_text())
    del fields[lost]
    with pytest.raises(UserError, match=f"damaged .{lost} is missing.; measure again"):
        Measurements.from_text(json.dumps(fields))
    with pytest.raises(UserError, match="version 99"):
        Measurements.from_text(json.dumps(fields | {"mimatrix_profile": 99}))


@pytest.mark.parametrize("lost", ["stage", "split", "shares", "parts"])
def test_a_damaged_plan_gets_a_sentence(lost: str) -> None:
    fields = PLAN.to_json()
    del fields[lost]
    with pytest.raises(UserError, match=f"damaged .{lost} is missing.; correct it, or make it again"):
        Plan.from_text(json.dumps(fields))
    with pytest.raises(UserError, match="version 99"):
        Plan.from_text(json.dumps(fields | {"mimatrix_plan": 99}))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"split": [[3.0, 2.0], []]}, "split[0] is 3.0, wanted a whole number from 1"),
        ({"split": [[4, True], []]}, "split[0] is true, wanted a whole number from 1"),
        ({"split": [[6, -1], []]}, "split[0] is -1, wanted a whole number from 1"),
        ({"split": [[5]]}, "split has 1 entries and parts has 2"),
        ({"split": [[], []]}, "global_batch is 5 and split has 0 samples"),
        ({"split": 5}, "split is 5, wanted a list"),
        ({"global_batch": 6}, "global_batch is 6 and split has 5 samples"),
        ({"step_s": 0}, "step_s is 0, wanted a number from 1e-12"),
        ({"step_s": float("nan")}, "step_s is NaN, wanted a number from 1e-12"),
        ({"parts": []}, "parts is empty"),
        ({"parts": [5, 6]}, "parts[0] is 5, wanted an object in braces"),
        ({"stage": float("inf")}, "stage is Infinity, wanted a whole number from 0"),
        ({"stage": 4}, "stage is 4, wanted 0 to 3"),
        ({"shares": [1.0]}, "shares has 1 entries, wanted 2"),
        ({"shares": [0.5, 0.2]}, "shares sum to 0.7, wanted 1"),
        ({"shares": [1.5, -0.5]}, "shares[1] is -0.5, wanted a number from 0"),
        ({"reasons": "because"}, 'reasons is "because", wanted a list'),
        ({"left_out": [{"name": "c"}]}, "left_out[0].reason is missing"),
    ],
)
def test_an_edited_plan_gets_a_sentence_with_its_file_and_field(change: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as caught:
        Plan.from_text(json.dumps(PLAN.to_json() | change), 'plan="p.json"')
    fix = "correct it, or make it again: mimatrix plan --output plan.json"
    assert str(caught.value) == f'plan="p.json" is damaged ({said}); {fix}'


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"device": [1]}, "profiles[1].device is [1], wanted text"),
        ({"device": 5}, "profiles[1].device is 5, wanted text"),
        ({"device": None}, "profiles[1].device is null, wanted text"),
        ({"device": " "}, 'profiles[1].device is " ", wanted a name'),
        ({"seconds": [[1, 0.1], [float("inf"), 1.0]]}, "profiles[1].seconds[1] is Infinity, wanted a whole number"),
        ({"seconds": [[1.5, 0.1]]}, "profiles[1].seconds[0] is 1.5, wanted a whole number from 1"),
        ({"seconds": [[1, 0.0], [2, 0.0]]}, "profiles[1].seconds[0] is 0.0, wanted a number from 1e-12"),
        ({"seconds": []}, "profiles[1].seconds is empty"),
        ({"seconds": [[1, 0.1], [1, 0.2]]}, "profiles[1].seconds[1] has the batch size 1 again"),
        ({"memory": [[1, 2, 3]]}, "profiles[1].memory[0] is [1, 2, 3], wanted a batch size and a number"),
        ({"room_bytes": float("nan")}, "profiles[1].room_bytes is NaN, wanted a number from 0"),
        ({"handling_s": [0, 0]}, "profiles[1].handling_s has 2 entries, wanted 4"),
    ],
)
def test_an_edited_profile_gets_a_sentence_with_its_file_and_field(change: dict[str, Any], said: str) -> None:
    fields = json.loads(MEASURED.to_text())
    fields["profiles"][1] |= change
    with pytest.raises(UserError) as caught:
        Measurements.from_text(json.dumps(fields), "p.json")
    assert str(caught.value).startswith(f"p.json is damaged ({said}")
    assert str(caught.value).endswith("); measure again: mimatrix profile script.py")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"equal_counts": "false"}, 'equal_counts is "false", wanted true or false'),
        ({"model": []}, "model is [], wanted an object in braces"),
        ({"profiles": []}, "profiles is empty"),
        ({"communication": {"once_s": [0] * 4, "round_s": [0] * 4, "reason": 3}}, "communication.reason is 3"),
    ],
)
def test_edited_measurements_get_a_sentence(change: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=re.escape(f"p.json is damaged ({said}")):
        Measurements.from_text(json.dumps(json.loads(MEASURED.to_text()) | change), "p.json")


def test_sizes_may_be_written_short() -> None:
    fields = json.loads(MEASURED.to_text())
    fields["profiles"][0]["room_bytes"] = 24e9
    room = Measurements.from_text(json.dumps(fields)).profiles[0].room_bytes
    assert (room, type(room)) == (24 * 10**9, int)


@pytest.mark.parametrize("depth", [900, 100_000])
def test_deeply_nested_text_gets_a_sentence(depth: int) -> None:
    nested = "[" * depth + "]" * depth
    for text in (nested, f'{{"mimatrix_profile": 1, "mimatrix_plan": 1, "model": {nested}, "parts": {nested}}}'):
        with pytest.raises(UserError, match="profile"):
            Measurements.from_text(text)
        with pytest.raises(UserError, match="plan"):
            Plan.from_text(text)


def test_whoever_was_left_out_is_named() -> None:
    assert explain_misfit(PLAN, ["x", "y"]) == ""
    assert explain_misfit(PLAN, ["x", "y", "z"]) == (
        "is for 2 ranks and there are 3, since it leaves out c; start only a and b (-n 2), or plan with all: "
        "mimatrix plan --keep-all"
    )
    for plan, here in ((replace(PLAN, left_out=()), 3), (PLAN, 1), (PLAN, 5)):
        said = f"is for 2 ranks and there are {here}; make another with mimatrix plan"
        assert explain_misfit(plan, ["x"] * here) == said
    many = replace(PLAN, left_out=tuple(LeftOut(str(rank), "") for rank in range(12)))
    assert "leaves out 0, 1, 2, 3, 4, 5, 6, 7 and 4 more;" in explain_misfit(many, ["x"] * 14)


def test_devices_in_another_order_are_refused_only_where_that_is_sure() -> None:
    parts = tuple(replace(part, device=device) for part, device in zip(PLAN.parts, ("A40", "3090"), strict=True))
    plan = replace(PLAN, parts=parts)
    assert explain_misfit(plan, ["A40", "3090"]) == ""
    assert explain_misfit(plan, ["3090", "A40"]) == (
        "has A40 as rank 0, which is 3090 here; start the ranks in the plan's order (A40 and 3090), or make another "
        "with mimatrix plan"
    )
    assert explain_misfit(plan, ["NVIDIA 3090", "NVIDIA A40"]) == ""
    assert explain_misfit(plan, ["cpu", "cpu"]) == ""
    # A plan that a run made names devices and nothing else.
    assert "has a as rank 0, which is b here" in explain_misfit(PLAN, ["b", "a"])
    assert "has 1 shares for 2 ranks" in explain_misfit(replace(PLAN, shares=Shares((1.0,))), ["a", "b"])


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
