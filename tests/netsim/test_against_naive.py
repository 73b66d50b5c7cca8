"""The simulator against a second one written from the model alone, on random clusters where nothing is alike."""

from dataclasses import dataclass
from random import Random

import numpy as np
import pytest
from numpy.typing import NDArray
from support.naive_simulator import Outcome, simulate

from mimatrix.cluster import (
    Bus,
    BySource,
    Cluster,
    Device,
    Ecmp,
    Fabric,
    Link,
    Node,
    Routes,
    Switch,
    topology_from_name,
)
from mimatrix.collectives import CATALOG, AlgorithmRequest, Collective, Schedule, Shares, build, find
from mimatrix.core.errors import UserError
from mimatrix.netsim import Costs, Timeline, Traffic, lower_bound_seconds, replay, run

CASES = 50
MOST_RANKS = 11
RELATIVE = 1e-9

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class ReplayCase:
    """One random question to both simulators."""

    cluster: Cluster
    schedule: Schedule
    placement: tuple[int, ...]
    message_bytes: float
    costs: Costs
    routes: Routes


@pytest.mark.parametrize("seed", range(CASES))
def test_replay_agrees_with_the_naive_simulator(seed: int) -> None:
    compare(random_case(seed))


@pytest.mark.parametrize("seed", range(CASES))
def test_no_replay_beats_the_lower_bound(seed: int) -> None:
    case = random_case(seed)
    bound = lower_bound_seconds(case.schedule, Fabric(case.cluster), case.placement, case.message_bytes)
    assert bound > 0
    assert real(case).seconds >= bound * (1 - 1e-9)


@pytest.mark.parametrize("seed", range(0, CASES, 5))
def test_run_on_prepared_traffic_is_replay(seed: int) -> None:
    case = random_case(seed)
    traffic = Traffic.of(case.schedule, Fabric(case.cluster), case.placement, case.routes)
    prepared, direct = run(traffic, case.message_bytes, case.costs), real(case)
    assert prepared.seconds == direct.seconds
    assert (prepared.ended_s == direct.ended_s).all()
    assert (prepared.channel_bytes == direct.channel_bytes).all()


@pytest.mark.parametrize("weights", [(0.1,) * 10 + (0.0,), (0.3, 0.3, 0.3, 0.1, 0.0), (0.0,) + (0.1,) * 10])
@pytest.mark.parametrize("algorithm", ["gdraa", "ring", "halving_doubling"])
def test_blocks_that_are_empty_but_for_rounding_carry_nothing(algorithm: str, weights: tuple[float, ...]) -> None:
    # These weights do not add up to one in floating point; the rest must not become a read that pays for its latency.
    shares, ranks = Shares.of(weights), len(weights)
    for collective in (Collective.REDUCE_SCATTER, Collective.ALL_GATHER):
        schedule = build(algorithm, AlgorithmRequest(collective, ranks, shares=shares))
        case = ReplayCase(
            topology_from_name(f"star:{ranks}"), schedule, tuple(range(ranks)), 1e3, Costs(sync_s=1e-6), Ecmp()
        )
        compare(case)


def test_the_cases_cover_what_they_should() -> None:
    cases = [random_case(seed) for seed in range(CASES)]
    assert {case.schedule.algorithm for case in cases} == set(CATALOG)
    assert {case.schedule.collective for case in cases} == set(Collective)
    nodes = [node for case in cases for node in case.cluster.nodes]
    assert {(bool(node.bus), bool(node.bus and node.bus.fanout)) for node in nodes} == {
        (False, False),
        (True, False),
        (True, True),
    }
    assert any(node.forwards for node in nodes)
    assert any("/" in link.a for case in cases for link in case.cluster.links)
    assert any(link.parallel > 1 for case in cases for link in case.cluster.links)
    assert sum(0.0 in case.schedule.shares.fractions for case in cases) >= 5
    assert {case.costs.in_flight for case in cases} >= {1, 2, 3}
    assert {np.isinf(case.costs.add_bytes_per_s) for case in cases} == {True, False}
    assert {case.costs.sync_s > 0 for case in cases} == {True, False}


def compare(case: ReplayCase) -> None:
    """Both simulators give the same total, the same times of every rank in every round, the same channels."""
    timeline, outcome = real(case), naive(case)
    assert timeline.seconds == pytest.approx(outcome.seconds, rel=RELATIVE, abs=0)
    ranks, rounds = case.schedule.ranks, len(case.schedule.rounds)
    assert timeline.ended_s == close(table(outcome.ended_s, ranks, rounds))
    assert timeline.began_s == close(table(outcome.began_s, ranks, rounds))
    assert timeline.channel_bytes == close(np.array(outcome.channel_bytes))
    assert timeline.channel_busy_s == close(np.array(outcome.channel_busy_s), of=outcome.seconds)


def real(case: ReplayCase) -> Timeline:
    return replay(case.schedule, case.cluster, case.placement, case.message_bytes, costs=case.costs, routes=case.routes)


def naive(case: ReplayCase) -> Outcome:
    fabric = Fabric(case.cluster)
    return simulate(case.schedule, fabric, case.placement, case.message_bytes, case.costs, case.routes)


def close(values: Floats, of: float = 0.0) -> object:
    """Equal to 1e-9 of each value, or of `of`."""
    return pytest.approx(values, rel=RELATIVE, abs=RELATIVE * of)


def table(times: dict[tuple[int, int], float], ranks: int, rounds: int) -> Floats:
    return np.array([[times[rank, number] for number in range(rounds)] for rank in range(ranks)])


def random_case(seed: int) -> ReplayCase:
    """Algorithms in turn, so that each of them comes often enough; everything else by lot."""
    rng = Random(seed)
    cluster = random_cluster(rng)
    devices = len(cluster.device_names)
    placement = tuple(rng.sample(range(devices), rng.randint(min(devices, 3), min(devices, MOST_RANKS))))
    schedule = random_schedule(rng, list(CATALOG)[seed % len(CATALOG)], len(placement))
    costs = Costs(
        sync_s=rng.choice([0.0, rng.uniform(1e-6, 1e-4)]),
        add_bytes_per_s=rng.choice([np.inf, random_rate(rng)]),
        in_flight=rng.choice([1, 2, 3, 4, 50]),
    )
    choice = BySource(tuple(rng.randrange(100) for _ in range(devices)))
    routes: Routes = Ecmp(seed) if rng.random() < 0.5 else choice
    return ReplayCase(cluster, schedule, placement, 10 ** rng.uniform(3, 8), costs, routes)


def random_cluster(rng: Random) -> Cluster:
    """Return a tree of switches with a few more links, and nodes of every make on them."""
    switches = [f"s{index}" for index in range(rng.randint(1, 4))]
    links = [cable(rng, name, rng.choice(switches[:index])) for index, name in enumerate(switches) if index]
    if len(switches) > 1:
        links += [cable(rng, *rng.sample(switches, 2)) for _ in range(rng.randint(0, 3))]
    nodes = []
    for index in range(rng.randint(3, 8)):
        node, nics = random_node(rng, f"n{index}", switches)
        nodes.append(node)
        links += nics
    return Cluster("random", tuple(nodes), tuple(map(Switch, switches)), tuple(links))


def random_node(rng: Random, name: str, switches: list[str]) -> tuple[Node, list[Link]]:
    """One to three devices with or without a bus; a NIC each, or one or two for all; now and then it forwards."""
    devices = (Device(),) * rng.randint(1, 3)
    bus = rng.choice([None, Bus(random_rate(rng), random_latency(rng), fanout=rng.choice([0, 0, 1, 2]))])
    node = Node(name, devices, bus, forwards=rng.random() < 0.1 and (bus is not None or len(devices) == 1))
    own = rng.random() < 0.35 and not node.forwards
    ends = list(node.device_names()) if own else [name] * rng.choice([1, 1, 2])
    return node, [cable(rng, end, rng.choice(switches)) for end in ends]


def cable(rng: Random, a: str, b: str) -> Link:
    return Link(a, b, random_rate(rng), random_latency(rng), parallel=rng.choice([1, 1, 1, 2, 3]))


def random_rate(rng: Random) -> float:
    """From a few round numbers, so that ties happen, or anything."""
    return rng.choice([1e9, 2.5e9, 10e9, 10 ** rng.uniform(8, 10.5)])


def random_latency(rng: Random) -> float:
    return rng.choice([0.0, 1e-6, rng.uniform(1e-7, 1e-5)])


def random_schedule(rng: Random, algorithm: str, ranks: int) -> Schedule:
    """Asks until the algorithm can do what is asked, with every option that it takes."""
    entry = find(algorithm)
    for _ in range(100):
        offers = {
            "shares": random_shares(rng, ranks),
            "segments": rng.randint(1, 3),
            "root": rng.randrange(ranks),
            "order": tuple(rng.sample(range(ranks), ranks)),
            "groups": random_groups(rng, ranks),
            "inside": rng.choice(["gdraa", "ring"]),
            "between": rng.choice(["gdraa", "ring", "halving_doubling"]),
            "servers": rng.randint(2, ranks),
        }
        asked = {name: offer for name, offer in offers.items() if name in entry.options}
        try:
            return build(algorithm, AlgorithmRequest(rng.choice(entry.collectives), ranks, **asked))  # type: ignore[arg-type]
        except UserError:
            continue
    raise AssertionError(f"{algorithm} built nothing for {ranks} ranks")


def random_shares(rng: Random, ranks: int) -> Shares | None:
    """None, or uneven, or uneven with some that own nothing."""
    kind = rng.randrange(3)
    if kind == 0:
        return None
    weights = [rng.uniform(0.1, 5) for _ in range(ranks)]
    if kind == 2:
        for rank in rng.sample(range(ranks), rng.randint(1, ranks - 1)):
            weights[rank] = 0.0
    return Shares.of(weights)


def random_groups(rng: Random, ranks: int) -> tuple[tuple[int, ...], ...]:
    """All ranks in two groups or more, in any order, often of unlike sizes."""
    order = rng.sample(range(ranks), ranks)
    cuts = sorted(rng.sample(range(1, ranks), rng.randint(1, ranks - 1)))
    return tuple(tuple(order[a:b]) for a, b in zip([0, *cuts], [*cuts, ranks], strict=True))
