"""HDRM: on every BiGraph up to 2,048 ranks no link carries two transfers of a step."""

import numpy as np
import pytest

from mimatrix.cluster import BySource, Fabric, topology_from_name
from mimatrix.collectives import Collective, FitOptions, fit, map_ranks, verify
from mimatrix.collectives.hdrm import side, switch_and_port
from mimatrix.core.errors import UserError
from mimatrix.netsim import Traffic

POWERS = [1 << step for step in range(11)]
BIGRAPHS = [
    pytest.param(h, m, marks=[pytest.mark.long] if h > 256 else [], id=f"{h}-{m}")
    for h in POWERS
    for m in POWERS
    if m <= h and 2 <= 2 * h * m <= 2048
]


@pytest.mark.parametrize(("switches", "endpoints"), BIGRAPHS)
def test_every_transfer_has_a_private_link(switches: int, endpoints: int) -> None:
    fabric = Fabric(topology_from_name(f"bigraph:{switches}x{endpoints}"))
    fitted = fit("hdrm", fabric, Collective.ALL_REDUCE)
    traffic = Traffic.of(fitted.schedule, fabric, fitted.placement, fitted.routes)
    assert (traffic.link_flows().max(axis=1) == 1).all()
    assert sorted(fitted.placement) == list(range(2 * switches * endpoints))
    upper = np.array(
        [fabric.cluster.switches[fabric.exits[device][0].core].group == "upper" for device in fitted.placement]
    )
    assert (upper[traffic.src] != upper[traffic.dst]).all(), "a transfer within one side"


@pytest.mark.parametrize(("switches", "endpoints"), [(4, 4), (8, 8), (16, 4), (32, 32)])
def test_random_placement_shares_links(switches: int, endpoints: int) -> None:
    fabric = Fabric(topology_from_name(f"bigraph:{switches}x{endpoints}"))
    fitted = fit("hdrm", fabric, Collective.ALL_REDUCE, FitOptions(placement="random", seed=1))
    assert Traffic.of(fitted.schedule, fabric, fitted.placement, fitted.routes).max_link_flows() >= 3


def test_twice_as_many_endpoints_as_switches_load_each_link_twice() -> None:
    for switches in (2, 4, 8):
        fabric = Fabric(topology_from_name(f"bigraph:{switches}x{2 * switches}"))
        fitted = fit("hdrm", fabric, Collective.ALL_REDUCE)
        traffic = Traffic.of(fitted.schedule, fabric, fitted.placement, fitted.routes)
        assert traffic.max_link_flows() == 2


def test_the_closed_form_by_hand() -> None:
    """BiGraph(2, 2), eight ranks: rank 5 = 0b101 is even, so upper; group 1, pair 0, so upper switch (0+1) mod 2."""
    assert [side(rank) for rank in range(8)] == [0, 1, 1, 0, 1, 0, 0, 1]
    assert switch_and_port(5, 2) == (1, 1)
    assert switch_and_port(7, 2) == (1, 1)
    assert switch_and_port(0, 2) == (0, 0)


@pytest.mark.parametrize(
    "word", ["bigraph:3x4", "bigraph:4x3", "bigraph:5x5", "bigraph:7x7", "bigraph:6x1", "bigraph:2x7"]
)
def test_other_sizes_fold_onto_the_opposite_side(word: str) -> None:
    fabric = Fabric(topology_from_name(word))
    fitted = fit("hdrm", fabric, Collective.ALL_REDUCE)
    verify(fitted.schedule)
    mapping = map_ranks(fabric, len(fabric.exits))
    assert sorted(mapping.placement) == list(range(len(fabric.exits)))
    groups = [fabric.cluster.switches[fabric.exits[device][0].core].group for device in mapping.placement]
    folded = [(groups[rank], groups[rank % mapping.core]) for rank in range(mapping.core, len(groups))]
    assert sum(a != b for a, b in folded) >= len(folded) // 2


@pytest.mark.parametrize("ranks", [2, 3, 5, 8, 12, 31])
def test_fewer_ranks_than_ports(ranks: int) -> None:
    fabric = Fabric(topology_from_name("bigraph:4x4"))
    fitted = fit("hdrm", fabric, Collective.ALL_REDUCE, FitOptions(ranks=ranks))
    verify(fitted.schedule)
    assert len(set(fitted.placement)) == ranks


@pytest.mark.parametrize(
    "word", ["leaf_spine:4x8", "leaf_spine:8x4", "leaf_spine:2x16", "leaf_spine:4x4,devices=4,nic=own"]
)
def test_leaf_spine_gives_every_source_its_spine(word: str) -> None:
    fabric = Fabric(topology_from_name(word))
    fitted = fit("hdrm", fabric, Collective.ALL_REDUCE)
    assert isinstance(fitted.routes, BySource)
    assert Traffic.of(fitted.schedule, fabric, fitted.placement, fitted.routes).max_link_flows() == 1
    hashed = fit("halving_doubling", fabric, Collective.ALL_REDUCE)
    assert Traffic.of(hashed.schedule, fabric, hashed.placement, hashed.routes).max_link_flows() > 1


def test_refuses_other_networks() -> None:
    with pytest.raises(UserError, match=r"hdrm needs a BiGraph .* or a leaf-spine network, .* use halving_doubling"):
        fit("hdrm", Fabric(topology_from_name("star:8")), Collective.ALL_REDUCE)


def test_parallel_cables_carry_twice_the_endpoints() -> None:
    for word in ("bigraph:4x8,parallel=2", "bigraph:2x8,parallel=4"):
        fabric = Fabric(topology_from_name(word))
        fitted = fit("hdrm", fabric, Collective.ALL_REDUCE)
        assert Traffic.of(fitted.schedule, fabric, fitted.placement, fitted.routes).max_link_flows() == 1
