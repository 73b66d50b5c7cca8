"""Plans: never worse than what trying everything finds, within memory, and with reasons that are true."""

import os
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import brute_force
from support.brute_force import PlanningCase, random_case

from mimatrix.collectives.shares import Shares
from mimatrix.core.errors import UserError
from mimatrix.core.text import spell_seconds
from mimatrix.planner.model.curve import Curve
from mimatrix.planner.model.plan import Plan
from mimatrix.planner.model.problem import CommunicationModel, FixedCommunication, Problem
from mimatrix.planner.model.profile import Communication, ModelSize, Profile
from mimatrix.planner.planner import make_plan
from mimatrix.planner.pricing import predict_step_s

CASES = int(os.environ.get("MIMATRIX_CASES", "60"))
MB = 1_000_000
MODEL = ModelSize("m", "net", 10 * MB, 40 * MB, 40 * MB, 80 * MB, MB)


def asked(case: PlanningCase, **more: Any) -> Problem:
    model = ModelSize("m", "net", 1, case.parameter_bytes, case.gradient_bytes, case.optimizer_bytes, case.unit_bytes)
    profiles = tuple(
        Profile("d", "m", _curve(rank.seconds), _curve(rank.memory), rank.room, rank.optimizer_s, rank.handling_s)
        for rank in case.ranks
    )
    paid = Communication(case.once_s, case.round_s)
    names = tuple("abc"[: len(profiles)])
    return Problem(
        global_batch=case.global_batch,
        model=model,
        profiles=profiles,
        names=names,
        communication=FixedCommunication(paid),
        equal_counts=case.equal_counts,
        **more,
    )


def _curve(values: tuple[float, ...]) -> Curve:
    return Curve(tuple((size, value) for size, value in enumerate(values) if size))


def plan_or_none(problem: Problem) -> Plan | None:
    try:
        return make_plan(problem)
    except UserError:
        return None


@pytest.mark.parametrize("stages", [(0,), (1,), (0, 1, 2, 3)], ids=str)
def test_a_sample_for_everyone_costs_what_it_may(stages: tuple[int, ...]) -> None:
    """Each rank that has room has one, unless the step would be longer by more than what was allowed."""
    fewer = 0
    for seed in range(CASES):
        case = random_case(seed)
        if not (plain := plan_or_none(asked(case, stages=stages))) or case.global_batch < len(case.ranks):
            continue
        found = make_plan(asked(case, stages=stages, min_one_sample_slack=0.5))
        assert found.global_batch == case.global_batch
        assert found.step_s <= plain.step_s * 1.5 * (1 + 1e-9)
        assert all(part.memory_bytes <= part.room_bytes for part in found.parts)
        generous = make_plan(asked(case, stages=stages, min_one_sample_slack=1e9))
        assert all(
            # In other stages who has no room for a sample may come to own less.
            batch or generous.stage or part.room_bytes < part.memory_bytes + rank.memory[1]
            for batch, part, rank in zip(generous.split.batches, generous.parts, case.ranks, strict=True)
        )
        fewer += not all(plain.split.batches)
    assert fewer > 0


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("stages", [(0,), (1,), (2,), (3,), (0, 1, 2, 3)], ids=str)
def test_never_above_what_trying_everything_finds(stages: tuple[int, ...]) -> None:
    """Both ways: not above the optimum by more than 1 %, and, as a plan is a way too, not below it either."""
    worst, found = 0.0, 0
    for seed in range(CASES):
        case = random_case(seed)
        plan = plan_or_none(asked(case, stages=stages))
        best = min(brute_force.shortest(case, stage) for stage in stages)
        assert (plan is None) == (best == float("inf")), f"case {seed}"
        if plan is None:
            continue
        found += 1
        own = brute_force.price(case, plan.stage, plan.split.micro, plan.shares.fractions)
        assert own == pytest.approx(plan.step_s, rel=1e-9), f"case {seed}"
        assert plan.split.total == case.global_batch
        assert best * (1 - 1e-9) <= plan.step_s <= best * (1 + plan.within) * (1 + 1e-9), f"case {seed}"
        assert plan.step_s <= min(brute_force.shortest_on_grid(case, stage) for stage in stages) * 1.01
        worst = max(worst, plan.step_s / best - 1)
    assert found > CASES / 10
    assert worst <= 0.01


def test_the_brute_force_sees_a_bad_plan() -> None:
    """Else one that says anything would pass."""
    case = next(case for case in map(random_case, range(50)) if brute_force.shortest(case, 3) < float("inf"))
    everything = [(1,) * case.global_batch, *[()] * (len(case.ranks) - 1)]
    shares = [1.0, *[0.0] * (len(case.ranks) - 1)]
    assert brute_force.price(case, 3, everything, shares) >= brute_force.shortest(case, 3)
    tight = replace(case, ranks=tuple(replace(rank, room=10) for rank in case.ranks))
    assert brute_force.price(tight, 3, everything, shares) == float("inf")


def device(
    slope: float = 0.01, fixed: float = 0.02, most: int = 16, room: float = 1000, optimizer_s: float = 0.004
) -> Profile:
    """Return a device with a fixed overhead; its memory is in MB, ten for each sample."""
    sizes = sorted({1, 2, most // 2 or 1, most})
    seconds = Curve.of([(size, fixed + slope * size) for size in sizes])
    memory = Curve.of([(size, 10.0 * MB * size) for size in sizes])
    return Profile("d", "m", seconds, memory, round(room * MB), optimizer_s)


def problem(*profiles: Profile, batch: int = 64, **more: Any) -> Problem:
    paid = Communication.of(0.02, 0.01, 0.01)
    names = tuple(f"node/{rank}" for rank in range(len(profiles)))
    given = {"communication": FixedCommunication(paid), **more}
    return Problem(global_batch=batch, model=MODEL, profiles=profiles, names=names, **given)


def check(asked: Problem, plan: Plan) -> None:
    """Check what holds for every plan of all ranks."""
    assert plan.split.total == asked.global_batch
    assert sum(plan.shares.fractions) == pytest.approx(1)
    for sizes, share, part, profile in zip(
        plan.split.micro, plan.shares.fractions, plan.parts, asked.profiles, strict=True
    ):
        largest = max(sizes, default=0)
        assert largest <= profile.seconds.most
        needed = asked.model.kept_bytes(plan.stage, share) + profile.memory.table[largest]
        assert needed <= profile.room_bytes + 1
        assert part.memory_bytes == pytest.approx(needed, abs=1)
        assert list(sizes) == sorted(sizes, reverse=True)
        assert part.busy_s + part.idle_s <= plan.step_s - plan.communication_s + 1e-9
    assert plan.step_s == pytest.approx(predict_step_s(asked, plan.stage, plan.split, plan.shares), rel=1e-12)
    assert plan.within >= 0


profiles = st.builds(
    device,
    slope=st.floats(0.001, 0.05),
    fixed=st.floats(0, 0.1),
    most=st.integers(1, 40),
    room=st.floats(60, 700),
    optimizer_s=st.floats(0.0001, 0.05),
)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(profiles, min_size=1, max_size=6),
    st.integers(1, 600),
    st.sampled_from([(0,), (1,), (2,), (3,), (0, 1, 2, 3)]),
    st.booleans(),
)
def test_what_holds_for_every_plan(
    found: list[Profile], batch: int, stages: tuple[int, ...], equal_counts: bool
) -> None:
    wanted = problem(*found, batch=batch, stages=stages, equal_counts=equal_counts)
    plan = plan_or_none(wanted)
    if plan is None:
        return
    check(wanted, plan)
    turned = plan_or_none(replace(wanted, profiles=tuple(reversed(found))))
    assert turned is not None
    # Both are within what they say of the same optimum.
    assert turned.step_s <= plan.step_s * (1 + turned.within) * (1 + 1e-9)
    assert plan.step_s <= turned.step_s * (1 + plan.within) * (1 + 1e-9)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(profiles, st.integers(1, 5), st.integers(1, 200), st.sampled_from([0, 1, 2, 3]))
def test_equal_devices_get_equal_batches(profile: Profile, count: int, batch: int, stage: int) -> None:
    roomy = replace(profile, room_bytes=10_000 * MB)
    plan = make_plan(problem(*[roomy] * count, batch=batch, stages=(stage,)))
    assert max(plan.split.batches) - min(plan.split.batches) <= 1
    assert plan.shares.fractions == pytest.approx([1 / count] * count, rel=0.02)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("batch", [1, 2, 3, 100])
def test_small_and_odd_batches(stage: int, batch: int) -> None:
    wanted = problem(device(most=1), device(most=16), device(most=1, slope=0.03), batch=batch, stages=(stage,))
    check(wanted, make_plan(wanted))


@pytest.mark.parametrize("seed", range(8))
def test_larger_problems_are_proven_within_a_percent(seed: int) -> None:
    draw = random.Random(seed)
    found = [
        device(draw.uniform(0.001, 0.02), draw.uniform(0, 0.1), draw.randint(4, 64), draw.uniform(200, 900))
        for _ in range(12)
    ]
    for stage in range(4):
        wanted = problem(*found, batch=draw.randint(1000, 5000), stages=(stage,))
        plan = plan_or_none(wanted)
        if plan is not None:
            check(wanted, plan)
            assert plan.within <= 0.01


@pytest.mark.timeout(20)
@pytest.mark.parametrize("stages", [(0,), (1,), (2,), (3,), (0, 1, 2, 3)], ids=str)
@pytest.mark.parametrize(("count", "most", "batch"), [(2, 16_384, 16_384), (5, 65_536, 200_000)])
@pytest.mark.parametrize("fixed", [0.0, 4.0, 40.0])
def test_large_micro_batches_are_planned_in_time_and_within_a_percent(
    stages: tuple[int, ...], count: int, most: int, batch: int, fixed: float
) -> None:
    found = [_wide(most, fixed, 1 + 0.3 * rank) for rank in range(count)]
    wanted = problem(*found, batch=batch, stages=stages)
    plan = make_plan(wanted)
    check(wanted, plan)
    assert plan.within <= 0.01


def _wide(most: int, fixed: float, slower: float) -> Profile:
    """As it is measured: in powers of two, each off by a little."""
    sizes = [1, *(1 << power for power in range(1, most.bit_length()))]
    seconds = [(size, slower * (fixed + 0.001 * size) * (1 + 0.05 * (size % 3))) for size in sizes]
    return Profile("d", "m", Curve.of(seconds), Curve.of([(1, 1.0), (most, 1.0)]), 1000 * MB, 0.004)


def test_a_faster_device_gets_more_and_the_reason_says_so() -> None:
    plan = make_plan(problem(device(slope=0.01, fixed=0), device(slope=0.04, fixed=0), batch=100))
    assert plan.split.batches == (80, 20)
    assert any("rank 0 (node/0) gets 4.0 times the samples of rank 1" in reason for reason in plan.reasons)
    assert any("4.0 times as fast" in reason for reason in plan.reasons)
    assert plan.reasons[0].startswith(f"stage {plan.stage}")
    assert sum(reason.startswith("stage") for reason in plan.reasons) == 4


def said_of_samples(plan: Plan) -> str:
    (said,) = (reason for reason in plan.reasons if "times the samples of" in reason)
    return said


def test_speeds_are_compared_at_the_same_size() -> None:
    """With few samples the fixed part of its curve makes a rank seem slower than it is."""
    found = device(fixed=0.5, optimizer_s=0.01), device(fixed=0.5, slope=0.02, optimizer_s=0.1)
    plan = make_plan(problem(*found, stages=(0,), batch=18))
    most, fewest = plan.split.batches
    assert most > 2 * fewest
    size = plan.split.micro[0][0]
    faster = found[1].seconds.at(size) / found[0].seconds.at(size)
    assert said_of_samples(plan) == (
        f"rank 0 (node/0) gets {most / fewest:.1f} times the samples of rank 1 (node/1): it is {faster:.1f} times as "
        f"fast with micro-batches of {size}, and it computes for {spell_seconds(plan.parts[0].busy_s)}, optimizer "
        f"included, rank 1 (node/1) for {spell_seconds(plan.parts[1].busy_s)}"
    )


@pytest.mark.parametrize("seed", range(30))
def test_only_what_is_fastest_by_the_sample_is_said_to_be(seed: int) -> None:
    draw = random.Random(seed)
    low = device(fixed=draw.uniform(0, 1), slope=draw.uniform(0.02, 0.05), most=draw.randint(2, 12))
    steep = replace(low, seconds=Curve.of([(1, 0.03), (4, 0.06), (8, 0.5), (16, 2.0)])) if seed % 2 else low
    plan = make_plan(problem(device(), steep, batch=draw.randint(20, 90), stages=(draw.choice((0, 1)),)))
    said = [reason for reason in plan.reasons if "fastest per sample" in reason]
    rates = [float(time) / size for size, time in enumerate(steep.seconds.table) if size]
    for each in said:
        assert set(plan.split.micro[1]) == {rates.index(min(rates)) + 1}
        assert f"in micro-batches of {plan.split.micro[1][0]}, its" in each


def test_states_go_where_there_is_room() -> None:
    """A quarter of the memory: the small device gets smaller micro-batches and a smaller share."""
    plan = make_plan(problem(device(room=400), device(room=60), stages=(3,), batch=64))
    assert plan.shares.fractions[1] < plan.shares.fractions[0]
    assert max(plan.split.micro[1]) < max(plan.split.micro[0])
    assert any("rank 1 (node/1) owns" in reason and "less of its" in reason for reason in plan.reasons)


def test_the_stage_rises_where_a_lower_one_does_not_fit() -> None:
    plan = make_plan(problem(device(room=150), device(room=150)))
    assert plan.stage == 1
    lacking = next(reason for reason in plan.reasons if reason.startswith("stage 0 does not fit"))
    assert lacking == "stage 0 does not fit: rank 0 (node/0) lacks 10 MB"


def test_given_shares_are_kept() -> None:
    shares = Shares((0.9, 0.1))
    wanted = problem(device(), device(), stages=(1,), shares=shares)
    plan = make_plan(wanted)
    assert plan.shares == shares
    check(wanted, plan)


def test_a_higher_stage_is_chosen_only_for_the_gain_that_was_asked_for() -> None:
    """Half of the optimizer's step is saved in stage 1, a few percent of a step."""
    found = [device(most=64, optimizer_s=0.04)] * 2
    free = Communication((0.0,) * 4)
    gained = [
        make_plan(problem(*found, stages=(0, 1), communication=FixedCommunication(free), stage_gain=gain))
        for gain in (1e-3, 0.05, 0.06)
    ]
    assert [plan.stage for plan in gained] == [1, 1, 0]
    assert "no higher one is more than 6 % shorter" in gained[-1].reasons[0]
    cramped = [device(most=64, optimizer_s=0.04, room=470)] * 2  # stage 0 fits only in more micro-steps
    assert (
        make_plan(problem(*cramped, stages=(0, 1), communication=FixedCommunication(free), stage_gain=0.06)).stage == 1
    )


def test_one_micro_step_is_kept_where_memory_allows() -> None:
    """Large micro-batches are slow here, so that several of half the size seem better."""
    seconds = Curve.of([(1, 0.01), (16, 0.1), (32, 0.3), (64, 0.7)])
    roomy = replace(device(most=64), seconds=seconds)
    for stage in (0, 2):
        several = make_plan(problem(roomy, roomy, stages=(stage,), equal_counts=True))
        one = make_plan(problem(roomy, roomy, stages=(stage,), equal_counts=True, one_micro_step=True))
        assert several.split.rounds > 1
        assert one.split.micro == ((32,), (32,))
    small = replace(roomy, room_bytes=(160 + 200) * MB)  # twenty samples at once, besides the model
    found = make_plan(problem(small, small, stages=(0,), equal_counts=True, one_micro_step=True))
    assert found.split.rounds > 1
    uneven = replace(roomy, seconds=seconds.scaled(3.0))
    found = make_plan(problem(roomy, uneven, stages=(0,), equal_counts=True, one_micro_step=True))
    assert found.split.rounds == 1
    assert found.split.batches[0] > found.split.batches[1]


def test_equal_counts_meet_in_every_micro_step() -> None:
    found = (device(most=4), device(most=16, slope=0.001, fixed=0.001))
    apart = make_plan(problem(*found, stages=(0,), batch=100))
    met = make_plan(problem(*found, stages=(0,), batch=100, equal_counts=True))
    assert met.step_s > apart.step_s
    check(problem(*found, stages=(0,), batch=100, equal_counts=True), met)


@pytest.mark.parametrize(
    ("room", "said"),
    [
        (5, "rank 1 (node/1) lacks 1 MB even if it owns nothing; use devices with more"),
        (40, "all ranks together lack 92 MB; add devices or"),
        (84, "all ranks together lack 4 MB; add devices or"),
        (88, "rank 0 (node/0) lacks 6 MB for one sample at a time; use devices with more"),
    ],
)
def test_what_cannot_fit_says_who_lacks_what_and_what_would_do(room: float, said: str) -> None:
    for may_leave_out in (False, True):
        with pytest.raises(UserError) as caught:
            make_plan(problem(device(room=max(room, 40)), device(room=room), may_leave_out=may_leave_out))
        assert str(caught.value) == (
            f"no stage fits: in stage 3 {said} memory (2 with room for 91 MB each would fit), or use a smaller model"
        )


@pytest.mark.parametrize("stages", [(0,), (1,), (2,), (3,), (0, 1, 2, 3)], ids=str)
@pytest.mark.parametrize("count", [1, 2, 5, 40])
def test_the_room_that_is_said_to_be_enough_is_enough_and_a_little_less_is_not(
    count: int, stages: tuple[int, ...]
) -> None:
    with pytest.raises(UserError) as caught:
        make_plan(problem(*[device(room=3)] * count, stages=stages))
    found = re.search(r"room for ([\d.]+) MB( each)? would fit", str(caught.value))
    assert found
    assert "leave" not in str(caught.value)
    assert "higher" not in str(caught.value)
    assert make_plan(problem(*[device(room=float(found[1]))] * count, stages=stages))
    assert plan_or_none(problem(*[device(room=float(found[1]) - 1.1)] * count, stages=stages)) is None


def test_those_that_cannot_hold_a_thing_are_left_out_together() -> None:
    wanted = problem(device(), device(room=2), device(room=3), device())
    with pytest.raises(UserError, match=r"rank 1 \(node/1\) lacks 4 MB .*; leave out ranks 1 and 2, or use"):
        make_plan(wanted)
    plan = make_plan(replace(wanted, may_leave_out=True))
    assert [each.name for each in plan.left_out] == ["node/1", "node/2"]
    assert all(each.reason.startswith("nothing fits with these 2, and the step takes") for each in plan.left_out)
    assert [part.name for part in plan.parts] == ["node/0", "node/3"]


def test_those_that_cannot_hold_a_thing_are_left_out_of_many() -> None:
    tiny = device(room=2)
    plan = make_plan(problem(*[device()] * 99, tiny, tiny, batch=10_000, may_leave_out=True))
    assert [each.name for each in plan.left_out] == ["node/99", "node/100"]


def test_what_does_not_fit_in_the_only_stage_says_that_others_may() -> None:
    with pytest.raises(UserError) as caught:
        make_plan(problem(device(room=120), device(), stages=(0,)))
    assert str(caught.value) == (
        "stage 0 does not fit: rank 0 (node/0) lacks 40 MB; allow a higher stage, leave it out, or use a smaller model"
    )


def test_bad_questions_get_a_sentence() -> None:
    with pytest.raises(UserError, match="no samples; use 1 or more"):
        make_plan(problem(device(), batch=0))
    with pytest.raises(UserError, match=r"is of another model \(other, and this is m\); measure this one"):
        make_plan(problem(replace(device(), model="other")))
    with pytest.raises(UserError, match=r"stages .* use some of 0, 1, 2, 3"):
        make_plan(problem(device(), stages=(4,)))
    with pytest.raises(UserError, match="one for each rank"):
        make_plan(problem(device(), shares=Shares((0.5, 0.5))))


@dataclass(frozen=True)
class CommunicationBy:
    """What a function says that ranks pay."""

    function: Callable[[tuple[int, ...]], Communication]

    def cost(self, members: tuple[int, ...]) -> Communication:
        return self.function(members)


@CommunicationBy
def slow_link(members: tuple[int, ...]) -> Communication:
    """Rank 2 hangs on a link that is a hundred times slower."""
    seconds = 1.0 if 2 in members else 0.01
    return Communication.of(2 * seconds, seconds, seconds)


def test_a_device_on_a_slow_link_is_left_out_with_the_figure() -> None:
    wanted = problem(device(), device(), device(), communication=slow_link)
    advised = make_plan(wanted)
    assert len(advised.parts) == 3
    assert not advised.left_out
    assert any(reason.startswith("advice: leave out node/2: the step takes") for reason in advised.reasons)
    plan = make_plan(replace(wanted, may_leave_out=True))
    assert [part.name for part in plan.parts] == ["node/0", "node/1"]
    assert [each.name for each in plan.left_out] == ["node/2"]
    assert "moving data takes" in plan.left_out[0].reason
    assert plan.step_s < advised.step_s / 1.01
    assert plan.split.total == 64


def unlike_links(slow: frozenset[int]) -> CommunicationModel:
    """Return communication in which a step pays for its slowest link."""
    return CommunicationBy(
        lambda members: Communication.of(*((2.0, 1.0, 1.0) if slow & set(members) else (0.02, 0.01, 0.01)))
    )


@pytest.mark.parametrize(("count", "slow"), [(6, {0, 1}), (6, {1, 4}), (7, {2, 3, 6}), (30, {3, 4, 17, 29})], ids=str)
def test_slow_ranks_that_hide_one_another_are_left_out_together(count: int, slow: set[int]) -> None:
    """Without one of them the step still waits for the others."""
    wanted = problem(*[device()] * count, communication=unlike_links(frozenset(slow)), batch=512)
    plan = make_plan(replace(wanted, may_leave_out=True))
    assert {each.name for each in plan.left_out} == {f"node/{rank}" for rank in slow}
    kept = make_plan(wanted)
    assert len(kept.parts) == count
    with_s, without_s = spell_seconds(kept.step_s), spell_seconds(plan.step_s)
    figure = f"the step takes {with_s} with these {len(slow)} and {without_s} without: moving data takes"
    assert all(each.reason.startswith(figure) for each in plan.left_out)
    (advice,) = (reason for reason in kept.reasons if reason.startswith("advice"))
    assert figure in advice
    assert all(f"node/{rank}" in advice for rank in slow)


def test_who_does_no_harm_is_not_left_out_with_those_that_do() -> None:
    """The kind has two on slow links and one on a fast one."""
    kinds = [device(slope=0.02 if rank < 3 else 0.01) for rank in range(6)]
    plan = make_plan(problem(*kinds, communication=unlike_links(frozenset({0, 1})), batch=512, may_leave_out=True))
    assert [each.name for each in plan.left_out] == ["node/0", "node/1"]


def test_two_slow_optimizers_hide_one_another_as_well() -> None:
    slow = device(optimizer_s=5.0)
    plan = make_plan(problem(device(), slow, device(), slow, stages=(0,), may_leave_out=True))
    assert [each.name for each in plan.left_out] == ["node/1", "node/3"]
    assert "an optimizer step there takes up to 5 s" in plan.left_out[0].reason


def test_islands_with_a_slow_link_between_them() -> None:
    """Either is better than both, and the faster one is best."""
    east = {0, 2, 4}

    @CommunicationBy
    def network(members: tuple[int, ...]) -> Communication:
        both = bool(east & set(members)) and bool(set(members) - east)
        return Communication.of(*((20.0, 10.0, 10.0) if both else (0.02, 0.01, 0.01)))

    kinds = [device(slope=0.02 if rank in east else 0.01) for rank in range(6)]
    plan = make_plan(problem(*kinds, communication=network, batch=512, may_leave_out=True))
    assert [part.name for part in plan.parts] == ["node/1", "node/3", "node/5"]


@pytest.mark.parametrize("seed", range(4))
def test_whom_to_leave_out_is_near_to_what_trying_every_set_finds(seed: int) -> None:
    draw = random.Random(seed)
    kinds = [device(draw.choice((0.01, 0.03)), optimizer_s=draw.choice((0.004, 1.0))) for _ in range(5)]
    slow_s = [draw.choice((0.01, 0.01, 1.0, 2.0)) for _ in kinds]

    @CommunicationBy
    def network(members: tuple[int, ...]) -> Communication:
        paid = max(slow_s[rank] for rank in members) if len(members) > 1 else 0.0
        return Communication.of(2 * paid, paid, paid)

    wanted = problem(*kinds, communication=network, batch=400)
    every = (kept for size in range(1, 6) for kept in combinations(range(5), size))
    best_s = min(make_plan(_only(wanted, kept)).step_s for kept in every)
    assert make_plan(replace(wanted, may_leave_out=True)).step_s <= best_s * 1.03


def _only(asked: Problem, kept: tuple[int, ...]) -> Problem:
    return replace(
        asked,
        profiles=tuple(asked.profiles[rank] for rank in kept),
        names=tuple(asked.names[rank] for rank in kept),
        communication=CommunicationBy(lambda members: asked.communication.cost(tuple(kept[each] for each in members))),
    )


def test_who_has_no_room_at_all_is_left_out_where_that_is_allowed() -> None:
    wanted = problem(device(), device(room=2), device())
    with pytest.raises(UserError, match=r"rank 1 \(node/1\) lacks"):
        make_plan(wanted)
    plan = make_plan(replace(wanted, may_leave_out=True))
    assert [each.name for each in plan.left_out] == ["node/1"]


def test_nobody_is_left_out_who_helps() -> None:
    plan = make_plan(problem(device(), device(slope=0.05), device(), may_leave_out=True))
    assert not plan.left_out
    assert not any("advice" in reason for reason in plan.reasons)
