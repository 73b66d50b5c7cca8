"""A cluster refuses, when it is made, everything that could not be hardware."""

import math
from dataclasses import FrozenInstanceError, replace

import pytest

from mimatrix.cluster import Bus, Cluster, Device, Link, Node, Switch
from mimatrix.cluster.model import MOST_PARTS
from mimatrix.core.errors import UserError

TWO = (Device("A40", 48 * 10**9), Device("V100", 0))
A, B = Node("a", TWO, Bus(16e9)), Node("b", (Device(),))
HUB = Switch("hub", "leaf")
LINKS = (Link("a/0", "hub", 1e9), Link("b", "hub", 2e9, 1e-6, 2))


def made(
    nodes: tuple[Node, ...] = (A, B), switches: tuple[Switch, ...] = (HUB,), links: tuple[Link, ...] = LINKS
) -> Cluster:
    return Cluster("lab", nodes, switches, links)


def refused(**parts: tuple[object, ...]) -> str:
    with pytest.raises(UserError) as caught:
        made(**parts)  # type: ignore[arg-type]
    return str(caught.value)


def test_devices_are_numbered_node_by_node() -> None:
    assert made().device_names == ("a/0", "a/1", "b/0")
    assert list(A.device_names()) == ["a/0", "a/1"]


def test_kinds_of_ends() -> None:
    assert made().kind_of == {
        "hub": "switch",
        "a": "node",
        "b": "node",
        "a/0": "device",
        "a/1": "device",
        "b/0": "device",
    }


def test_what_is_not_said_is_plain() -> None:
    assert Device() == Device("gpu", 0)
    assert Bus(1e9) == Bus(1e9, latency_s=0.0, fanout=0)
    assert Node("a", TWO) == Node("a", TWO, bus=None, forwards=False)
    assert Switch("a") == Switch("a", group="")
    assert Link("a", "b", 1e9) == Link("a", "b", 1e9, latency_s=0.0, parallel=1)


def test_clusters_are_values() -> None:
    assert made() == made()
    assert hash(made()) == hash(made())
    assert made() != replace(made(), links=LINKS[:1])
    with pytest.raises(FrozenInstanceError):
        made().name = "other"  # type: ignore[misc]
    # What was computed of one must not stick to a copy of it.
    first = made()
    assert len(first.device_names) == 3
    assert len(replace(first, nodes=(B,), links=()).device_names) == 1


def test_a_cluster_needs_a_device() -> None:
    assert refused(nodes=(), links=()) == 'cluster "lab" has no device; add a [[node]] with devices = [...]'
    assert refused(nodes=(B, Node("c", ()))) == 'node "c" has no device; add one, or leave the node out'


@pytest.mark.parametrize(
    ("nodes", "switches", "name", "times"),
    [
        ((A, B, A), (HUB,), "a", 2),
        ((A, B), (HUB, HUB, HUB), "hub", 3),
        ((A, B, Node("hub", TWO)), (HUB,), "hub", 2),
    ],
)
def test_names_are_given_once(nodes: tuple[Node, ...], switches: tuple[Switch, ...], name: str, times: int) -> None:
    said = refused(nodes=nodes, switches=switches)
    assert said == f'the name "{name}" is used {times} times; give every node and switch its own'


@pytest.mark.parametrize("name", ["", "a/0", "/", "a->b", "->"])
def test_names_that_mean_something_else(name: str) -> None:
    wanted = f'"{name}" cannot be a name; use letters, digits and hyphens'
    assert refused(nodes=(Node(name, TWO),), links=()).startswith(wanted)
    assert refused(switches=(Switch(name),), links=()).startswith(wanted)


@pytest.mark.parametrize("name", ["a b", "ä", "0", "a-b", "->"[::-1], "a.b", "節點"])
def test_other_names_are_fine(name: str) -> None:
    assert made((Node(name, TWO),), (), ()).device_names == (f"{name}/0", f"{name}/1")


@pytest.mark.parametrize(
    ("end", "offer"),
    [
        ("hib", '; did you mean "hub"?'),
        ("a/2", '; did you mean "a/1"?'),
        ("B/0", '; did you mean "b/0"?'),
        ("zebra", "; known are a, a/0, a/1, b, b/0, hub"),
    ],
)
def test_links_end_somewhere(end: str, offer: str) -> None:
    said = f'ends at "{end}", which does not exist{offer}'
    assert refused(links=(Link(end, "hub", 1e9),)) == f"the link {end} - hub {said}"
    assert refused(links=(*LINKS, Link("a", end, 1e9))) == f"the link a - {end} {said}"


def test_an_unknown_end_of_a_large_cluster_is_still_a_sentence() -> None:
    nodes = tuple(Node(f"machine{index}", TWO) for index in range(3000))
    said = refused(nodes=nodes, links=(Link("zebra", "hub", 1e9),))
    assert "known are hub, machine0, " in said
    assert len(said) < 500


def test_links_have_two_ends() -> None:
    assert refused(links=(Link("hub", "hub", 1e9),)) == "the link hub - hub joins a thing to itself; remove it"


@pytest.mark.parametrize("parallel", [0, -1, -(10**9)])
def test_cables_are_counted_from_one(parallel: int) -> None:
    said = refused(links=(Link("a", "hub", 1e9, parallel=parallel),))
    assert said == f"the link a - hub has parallel = {parallel}; use 1 or more"


@pytest.mark.parametrize(
    ("rate", "shown"),
    [(0.0, "0bit"), (-0.0, "-0bit"), (-1e9, "-8Gbit"), (math.nan, "nanbit"), (math.inf, "unlimited")],
)
def test_rates(rate: float, shown: str) -> None:
    said = f"has the rate {shown}; write a finite one above zero, as in 25Gbit"
    assert refused(links=(Link("a", "hub", rate),)) == f"the link a - hub {said}"
    assert refused(nodes=(Node("a", TWO, Bus(rate)), B)) == f'the bus of node "a" {said}'


@pytest.mark.parametrize("rate", [1e-3, 0.5, 1e18])
def test_any_finite_rate_above_zero_is_one(rate: float) -> None:
    assert made(links=(Link("a", "hub", rate),)).links[0].rate_bytes_per_s == rate


@pytest.mark.parametrize("latency", [-1e-9, -math.inf, math.inf, math.nan])
def test_latencies(latency: float) -> None:
    said = f"has the latency {latency} s; it must be zero or more and short, as in 3us"
    assert refused(links=(Link("a", "hub", 1e9, latency),)) == f"the link a - hub {said}"
    assert refused(nodes=(Node("a", TWO, Bus(1e9, latency)), B)) == f'the bus of node "a" {said}'


def test_memory() -> None:
    said = refused(nodes=(A, B, Node("c", (Device(), Device("A40", -1)))))
    assert said == 'a device of node "c" has less than no memory; write for example memory = "24GB"'


def test_fanout() -> None:
    said = refused(nodes=(B, Node("c", TWO, Bus(1e9, fanout=-1))), links=())
    assert said == 'the bus of node "c" has fanout -1; use 0 (no PCIe switch) or more'
    assert made((Node("c", TWO, Bus(1e9, fanout=7)),), (), ()).nodes[0].bus == Bus(1e9, fanout=7)


def test_too_large() -> None:
    said = refused(links=(Link("a", "hub", 1e9, parallel=MOST_PARTS - 3),))
    assert f"3 devices, 1 switches and {MOST_PARTS - 3} cables; use fewer, {MOST_PARTS} in all at the most" in said
    assert "use fewer" in refused(nodes=(Node("a", (Device(),) * (MOST_PARTS + 1)),), links=())
    # As many as there may be: three devices, a switch, and the rest of it in cables.
    assert made(links=(Link("a", "hub", 1e9, parallel=MOST_PARTS - 4),)).links[0].parallel == MOST_PARTS - 4


def test_devices_of_a_node_that_forwards_are_joined_by_a_bus() -> None:
    """Otherwise they would reach one another at no cost."""
    with pytest.raises(UserError, match="forwards and has several devices; say what joins them, as bus ="):
        Cluster("c", (Node("a", (Device(), Device()), forwards=True),), (), ())
