"""Modes: prices that follow what they are made from, and a choice that says why."""

from dataclasses import replace
from itertools import pairwise
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimatrix.cluster import Cluster, Device, Link, Node, Switch
from mimatrix.planner.communication import SimulatedCommunication
from mimatrix.planner.hybrid_price import price_hybrid, sample_worth
from mimatrix.planner.mode_choice import ModeChoice, choose_mode
from mimatrix.planner.model.curve import Curve
from mimatrix.planner.model.problem import FixedCommunication, Problem
from mimatrix.planner.model.profile import Communication, ModelSize, Profile
from mimatrix.planner.push_network import MESSAGE_S

MBIT, MB = 1e6 / 8, 1_000_000
BATCH = 64


def star(rates: list[float]) -> Cluster:
    nodes = tuple(Node(f"n{number}", (Device(),)) for number in range(len(rates)))
    links = tuple(Link(node.name, "hub", rate, 1e-5) for node, rate in zip(nodes, rates, strict=True))
    return Cluster("star", nodes, (Switch("hub"),), links)


def asked(cluster: Cluster, sample_s: list[float], size: int, room: int = 1 << 34) -> Problem:
    model = ModelSize("m", "net", size // 4, size, size, size, size // 100)
    flat = Curve(((1, 1000.0), (BATCH, 1000.0)))
    profiles = tuple(
        Profile("cpu", "m", Curve(((1, each), (BATCH, BATCH * each))), flat, room, size * 1e-9) for each in sample_s
    )
    names = tuple(f"n{rank}" for rank in range(len(profiles)))
    return Problem(
        global_batch=BATCH,
        model=model,
        profiles=profiles,
        names=names,
        communication=SimulatedCommunication(cluster, size),
        stages=(0,),
    )


def chosen(rates: list[float], sample_s: list[float], size: int) -> ModeChoice:
    cluster = star(rates)
    return choose_mode(asked(cluster, sample_s, size), [[rank] for rank in range(len(rates))], cluster)


def test_fast_links_between_like_devices_are_for_all_together() -> None:
    found = chosen([1000 * MBIT] * 4, [4e-3] * 4, MB)
    assert found.mode == "sync"
    assert found.reason.startswith("sync: all together make ")


def test_slow_links_between_many_are_for_groups() -> None:
    found = chosen([20 * MBIT] * 24, [4e-3] * 24, MB)
    assert found.mode == "hybrid"
    assert found.hybrid
    assert found.hybrid.worth_per_s > found.sync.samples_per_s
    assert "since moving 1 MB at 20Mbit takes" in found.reason


def test_the_network_is_not_blamed_for_what_meeting_takes() -> None:
    cluster = star([10_000 * MBIT] * 2)
    slow = Communication((0.05,) * 4)
    problem = replace(asked(cluster, [1e-5] * 2, MB), communication=FixedCommunication(slow))
    found = choose_mode(problem, [[0], [1]], cluster)
    assert found.mode == "hybrid"
    assert "since meeting to exchange 1 MB takes 50 ms of each" in found.reason


@pytest.mark.parametrize("hosts", [2, 3, 4])
def test_faster_links_never_make_either_slower(hosts: int) -> None:
    found = [chosen([rate * MBIT] * hosts, [2e-3] * hosts, 4 * MB) for rate in (5, 10, 20, 50, 100, 200, 500, 1000)]
    for slow, fast in pairwise(found):
        assert slow.hybrid
        assert fast.hybrid
        assert fast.sync.samples_per_s >= slow.sync.samples_per_s
        assert fast.hybrid.samples_per_s >= slow.hybrid.samples_per_s * (1 - 1e-9) or (
            fast.hybrid.overlaps,
            fast.hybrid.local_steps,
        ) != (slow.hybrid.overlaps, slow.hybrid.local_steps)
        assert fast.hybrid.worth_per_s >= slow.hybrid.worth_per_s * (1 - 1e-9)


def test_once_links_are_fast_enough_for_all_together_faster_ones_are_too() -> None:
    modes = [chosen([rate * MBIT] * 24, [2e-2] * 24, MB).mode for rate in (2, 10, 50, 200, 1000, 10_000)]
    assert modes == sorted(modes)
    assert len(set(modes)) == 2


def test_two_groups_on_a_slow_link_take_what_it_carries() -> None:
    """Each pushes half to the other's shard, mirrors both halves and pulls half: twice all parameters each way."""
    size, rate = 8 * MB, 10 * MBIT
    cluster = star([rate, rate])
    hybrid = price_hybrid(asked(cluster, [1e-5] * 2, size), [[0], [1]], cluster)
    for group in hybrid.groups:
        assert group.cycle_s == pytest.approx(2 * size / rate / 0.7, rel=0.01)
    assert hybrid.local_steps == 10
    assert hybrid.samples_per_s == pytest.approx(10 * 0.7 * BATCH * rate / size, rel=0.01)
    assert hybrid.worth_per_s == hybrid.samples_per_s / 2


def test_one_group_on_a_slow_link_slows_no_push_that_is_rarer_anyway() -> None:
    even = price_hybrid(*_pair([100 * MBIT, 100 * MBIT], [1e-2, 1e-2]))
    slow = price_hybrid(*_pair([100 * MBIT, 100 * MBIT], [1e-2, 1e-1]))
    assert slow.groups[0].cycle_s == pytest.approx(even.groups[0].cycle_s)
    assert slow.groups[0].staleness < even.groups[0].staleness
    assert slow.groups[1].staleness > even.groups[1].staleness


def _pair(rates: list[float], sample_s: list[float]) -> tuple[Problem, list[list[int]], Cluster]:
    cluster = star(rates)
    return asked(cluster, sample_s, MB), [[0], [1]], cluster


def test_who_has_a_part_of_a_processor_pays_for_serving() -> None:
    problem, groups, cluster = _pair([1000 * MBIT] * 2, [1e-4] * 2)
    whole = price_hybrid(problem, groups, cluster, [1.0, 1.0])
    assert whole == price_hybrid(problem, groups, cluster)
    half = price_hybrid(problem, groups, cluster, [0.5, 0.5])
    computing_s = half.groups[0].plan.step_s * max(1, half.local_steps)
    pushed = half.groups[0].cycle_s - computing_s
    assert half.samples_per_s < whole.samples_per_s
    # A message to each shard, one on to a mirror, and what both groups have served here, all at half the speed.
    assert pushed > 2 * MESSAGE_S * (2 + 2 + 2 * 2)
    slow = price_hybrid(problem, groups, cluster, [1.0, 0.05])
    assert slow.groups[0].cycle_s < slow.groups[1].cycle_s


def test_one_group_has_nobody_to_wait_for() -> None:
    cluster = star([MBIT] * 2)
    assert choose_mode(asked(cluster, [1e-3] * 2, MB), [[0, 1]], cluster).hybrid is None


def test_what_does_not_fit_apart_stays_together() -> None:
    cluster = star([MBIT] * 4)
    problem = asked(cluster, [1e-3] * 4, MB, room=5 * MB // 2)
    whole = replace(problem, stages=(0, 1, 2, 3))
    found = choose_mode(whole, [[0], [1], [2], [3]], cluster)
    assert (found.mode, found.hybrid) == ("sync", None)
    assert "does not fit" in found.reason


def test_a_known_obstacle_is_the_reason() -> None:
    cluster = star([MBIT] * 2)
    found = choose_mode(asked(cluster, [1e-3] * 2, MB), [[0], [1]], cluster, objection="it cannot be cut")
    assert found.reason == "sync: groups cannot train apart: it cannot be cut"


def test_it_comes_back_from_json() -> None:
    found = chosen([20 * MBIT] * 3, [4e-3, 4e-3, 8e-3], MB)
    assert ModeChoice.from_json(found.to_json()) == found


def test_later_is_worth_less() -> None:
    assert sample_worth(0) == 1
    assert all(sample_worth(late) > sample_worth(late + 1) > 0 for late in range(20))


@settings(max_examples=60, deadline=None)
@given(
    rates=st.lists(st.floats(1, 10_000), min_size=2, max_size=5),
    factors=st.lists(st.floats(0.2, 5), min_size=5, max_size=5),
    sample_s=st.floats(1e-5, 1e-2),
    size=st.integers(10_000, 100 * MB),
)
def test_prices_hold_together(rates: list[float], factors: list[float], sample_s: float, size: int) -> None:
    samples = [sample_s * factor for factor in factors[: len(rates)]]
    found = chosen([rate * MBIT for rate in rates], samples, size)
    hybrid = found.hybrid
    assert hybrid
    assert (found.mode == "hybrid") == (hybrid.worth_per_s > 1.05 * found.sync.samples_per_s)
    assert 0 < hybrid.worth_per_s <= hybrid.samples_per_s < inf
    for group in hybrid.groups:
        computing_s = max(1, hybrid.local_steps) * group.plan.step_s
        alone = max(computing_s, group.push_s) if hybrid.overlaps else computing_s + group.push_s
        assert group.cycle_s >= alone * (1 - 1e-9)
        assert group.push_s >= MESSAGE_S * (len(rates) + 2)
        assert group.staleness >= float(hybrid.overlaps)
    # No NIC sends more than it can: its pushes, its shard to the mirror, and what others pull.
    part = size / len(rates)
    per_s = [1 / group.cycle_s for group in hybrid.groups]
    for number, rate in enumerate(rates):
        sent = per_s[number] * part * (len(rates) - 1) + sum(per_s) * part + (sum(per_s) - per_s[number]) * part
        assert sent <= 0.7 * rate * MBIT * (1 + 1e-9)
