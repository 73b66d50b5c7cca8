"""Orders and groups follow the cluster whatever the placement."""

from itertools import pairwise

import numpy as np
import pytest

from mimatrix.cluster import Fabric, topology_from_name
from mimatrix.collectives import Collective, even_groups, fit, natural_groups, nic_rates, ring_order
from mimatrix.netsim import Traffic


@pytest.mark.parametrize(
    "word", ["leaf_spine:4x4,devices=2", "leaf_spine:3x5", "fat_tree:4", "bigraph:4x4", "star:6,devices=3"]
)
def test_each_node_and_rack_is_entered_once(word: str) -> None:
    fabric = Fabric(topology_from_name(word))
    placement = [int(device) for device in np.random.default_rng(3).permutation(len(fabric.exits))]
    order = ring_order(fabric, placement)
    assert sorted(order) == list(range(len(placement)))
    for label in (fabric.node_of, np.array([exits[0].core for exits in fabric.exits])):
        visited = [int(label[placement[rank]]) for rank in order]
        changes = sum(a != b for a, b in pairwise(visited))
        assert changes == len(set(visited)) - 1


def test_the_fastest_nic_comes_first() -> None:
    fabric = Fabric(topology_from_name("star:4,rate=10Gbit+40Gbit+20Gbit+30Gbit"))
    assert ring_order(fabric, range(4)) == (1, 3, 2, 0)


def test_a_ring_network_is_walked_round() -> None:
    fabric = Fabric(topology_from_name("ring:8"))
    order = ring_order(fabric, [3, 6, 1, 0, 5, 7, 2, 4])
    places = [[3, 6, 1, 0, 5, 7, 2, 4][rank] for rank in order]
    assert all((b - a) % 8 in (1, 7) for a, b in pairwise(places))


def test_groups_are_nodes_then_racks_then_numbers() -> None:
    assert natural_groups(Fabric(topology_from_name("star:2,devices=3")), range(6)) == ((0, 1, 2), (3, 4, 5))
    assert natural_groups(Fabric(topology_from_name("leaf_spine:2x3")), range(6)) == ((0, 1, 2), (3, 4, 5))
    assert (
        natural_groups(Fabric(topology_from_name("star:9")), range(9))
        == even_groups(9)
        == ((0, 1, 2), (3, 4, 5), (6, 7, 8))
    )


def test_a_shared_nic_is_divided_among_those_placed_there() -> None:
    fabric = Fabric(topology_from_name("star:2,devices=4,rate=100Gbit"))
    assert nic_rates(fabric, [0, 1, 4]).tolist() == [6.25e9, 6.25e9, 12.5e9]


@pytest.mark.parametrize("word", ["torus:4x4", "torus:2x4x4", "ring:9"])
def test_a_ring_uses_each_link_of_a_torus_at_most_once(word: str) -> None:
    fabric = Fabric(topology_from_name(word))
    fitted = fit("ring", fabric, Collective.ALL_REDUCE)
    assert Traffic.of(fitted.schedule, fabric, fitted.placement, fitted.routes).max_link_flows() == 1
