"""Measured links as a cluster, and warnings about slow pairs."""

from mimatrix.cluster import Device
from mimatrix.profiler import Links, slow_pair_warnings, to_cluster

DEVICES = (Device("gpu", 1), Device("gpu", 2), Device("cpu", 3))


def links(rates: list[list[float]]) -> Links:
    return Links(
        tuple(tuple(1e-5 * (a != b) for b in range(len(rates))) for a in range(len(rates))), tuple(map(tuple, rates))
    )


def test_measured_links_become_nodes_around_one_switch() -> None:
    rates = [[0, 9e9, 1e9], [9e9, 0, 1e9], [1e9, 1e9, 0]]
    cluster = to_cluster(links(rates), ("rack/a", "rack/a", "b"), DEVICES)
    assert [node.name for node in cluster.nodes] == ["rack-a", "b"]
    assert [node.devices for node in cluster.nodes] == [DEVICES[:2], DEVICES[2:]]
    assert cluster.nodes[0].bus is not None
    assert cluster.nodes[0].bus.rate_bytes_per_s == 9e9
    assert cluster.nodes[1].bus is None
    assert [(link.rate_bytes_per_s, link.latency_s) for link in cluster.links] == [(1e9, 5e-6)] * 2
    alone = to_cluster(links([[0, 5e9], [5e9, 0]]), ("a", "a"), DEVICES[:2])
    assert (len(alone.nodes), alone.links, alone.switches) == (1, (), ())


def test_a_pair_slower_than_its_nics_is_warned_about() -> None:
    rates = [[0, 1e9, 1e9], [1e9, 0, 2e8], [1e9, 9e8, 0]]
    (said,) = slow_pair_warnings(links(rates), ("a", "b", "c"))
    assert said.startswith("b to c reaches 1.6Gbit, although both reach 8Gbit")
