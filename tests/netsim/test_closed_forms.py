"""Replays on a star against closed forms, to 1e-9."""

from math import log2

import pytest

from mimatrix.cluster import topology_from_name
from mimatrix.cluster.topologies import Server, star
from mimatrix.collectives import AlgorithmRequest, Collective, build
from mimatrix.netsim import Costs, replay

RATE, LATENCY, SYNC = 25e9 / 8, 1.5e-6, 4e-6
HOPS = 2 * LATENCY
SIZES = [1, 1000, 1 << 20, 10**9]


def seconds(name: str, ranks: int, size: int, costs: Costs = Costs(sync_s=SYNC), **options: int) -> float:  # noqa: B008
    schedule = build(name, AlgorithmRequest(Collective.ALL_REDUCE, ranks, **options))  # type: ignore[arg-type]
    cluster = star(ranks, Server(rates_bytes_per_s=(RATE,), latency_s=LATENCY))
    return replay(schedule, cluster, None, size, costs=costs).seconds


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 16, 33, 100])
class TestOnAStar:
    def test_ring(self, ranks: int, size: int) -> None:
        wanted = 2 * (ranks - 1) * (SYNC + HOPS + size / ranks / RATE)
        assert seconds("ring", ranks, size) == pytest.approx(wanted, rel=1e-9)

    def test_gdraa(self, ranks: int, size: int) -> None:
        wanted = 2 * (SYNC + HOPS + (ranks - 1) * size / ranks / RATE)
        assert seconds("gdraa", ranks, size) == pytest.approx(wanted, rel=1e-9)

    def test_gdraa_one_read_at_a_time_costs_the_same(self, ranks: int, size: int) -> None:
        costs = Costs(sync_s=SYNC, in_flight=1)
        assert seconds("gdraa", ranks, size, costs) == pytest.approx(seconds("gdraa", ranks, size), rel=1e-9)

    def test_gdraa_in_segments(self, ranks: int, size: int) -> None:
        """The first and last round carry one phase, those between both: a rank reads 1 + (P-2)/P of a segment."""
        segment = size / 4
        ends = 2 * (SYNC + HOPS + (ranks - 1) * segment / ranks / RATE)
        middle = 3 * (SYNC + HOPS + (1 + (ranks - 2) / ranks) * segment / RATE)
        assert seconds("gdraa", ranks, size, segments=4) == pytest.approx(ends + middle, rel=1e-9)

    def test_parameter_server(self, ranks: int, size: int) -> None:
        wanted = 2 * (SYNC + HOPS + (ranks - 1) * size / RATE)
        assert seconds("parameter_server", ranks, size) == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("ranks", [2, 4, 8, 32, 128])
def test_halving_doubling(ranks: int, size: int) -> None:
    wanted = 2 * log2(ranks) * (SYNC + HOPS) + 2 * size * (1 - 1 / ranks) / RATE
    assert seconds("halving_doubling", ranks, size) == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize(("ranks", "core"), [(3, 2), (6, 4), (17, 16), (100, 64)])
def test_folded_halving_doubling_waits_for_the_whole_message_twice(ranks: int, core: int) -> None:
    size = 10**8
    folds = 2 * (SYNC + HOPS + size / RATE)
    wanted = folds + 2 * log2(core) * (SYNC + HOPS) + 2 * size * (1 - 1 / core) / RATE
    assert seconds("halving_doubling", ranks, size) == pytest.approx(wanted, rel=1e-9)


def test_adding_can_be_the_bottleneck() -> None:
    """Half of a ring's rounds add: at half the wire's rate they take twice as long."""
    costs = Costs(add_bytes_per_s=RATE / 2)
    size = 10**9
    wanted = 7 * (HOPS + size / 8 / (RATE / 2)) + 7 * (HOPS + size / 8 / RATE)
    assert seconds("ring", 8, size, costs) == pytest.approx(wanted, rel=1e-9)


def test_a_rank_waits_only_for_those_it_reads_from() -> None:
    """One slow NIC in a ring: its successor is late from the first round on, the rank before it only at the end."""
    cluster = topology_from_name("star:8,rate=100Gbit+7*100Gbit,latency=0us")
    slow = topology_from_name("star:8,rate=10Gbit+7*100Gbit,latency=0us")
    schedule = build("ring", AlgorithmRequest(Collective.ALL_REDUCE, 8))
    fast_ends, slow_ends = (replay(schedule, each, None, 8 * 10**8).ended_s for each in (cluster, slow))
    assert slow_ends[1, 0] == pytest.approx(10 * fast_ends[1, 0])
    for far, rounds in ((2, 1), (4, 3), (6, 5)):
        assert slow_ends[far, :rounds] == pytest.approx(fast_ends[far, :rounds])
        assert slow_ends[far, rounds] > 2 * fast_ends[far, rounds]
