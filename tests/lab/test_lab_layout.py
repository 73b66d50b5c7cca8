"""The lab as a value: addresses, routes that are followed by hand, the orders made of it."""

from collections.abc import Iterator
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from mimatrix.cluster import Bus, BySource, Cluster, Device, Fabric, Link, Node, Switch, load_cluster
from mimatrix.cluster.routes import NO_CHANNEL, find_paths
from mimatrix.core.errors import UserError
from mimatrix.lab.ip_commands import PAYLOAD, add_cables, add_namespaces, configure_space, namespace, shape
from mimatrix.lab.layout import LabLayout, Route, lay_out
from mimatrix.lab.state import check_name
from mimatrix.processes.cgroups import cpu_cgroups, parse_cpus

OWN_AND_SHARED = Cluster(
    "mixed",
    (
        Node("a", (Device(), Device()), Bus(1e9)),
        Node("b", (Device(), Device()), Bus(1e9, fanout=2)),
        Node("c", (Device(),)),
    ),
    (Switch("left"), Switch("right")),
    (
        Link("a", "left", 1e6),
        Link("b/0", "left", 1e6),
        Link("b/1", "right", 1e6),
        Link("c", "left", 1e6),
        Link("right", "c", 2e6),
        Link("left", "right", 1e6, parallel=3),
    ),
)
CLUSTERS = {
    word: load_cluster(word)
    for word in (
        "star:1",
        "star:5,rate=2*400Mbit+100Mbit",
        "leaf_spine:2x2",
        "leaf_spine:3x4,devices=2",
        "fat_tree:4",
        "bigraph:2x2",
        "bigraph:2x2,parallel=2,devices=2,nic=own",
        "ring:5",
        "torus:3x3",
    )
} | {"mixed": OWN_AND_SHARED}


@pytest.fixture(params=CLUSTERS)
def layout(request: pytest.FixtureRequest) -> LabLayout:
    return lay_out(CLUSTERS[request.param])


def follow(layout: LabLayout, source: str, target: str, start: str, end: str) -> Iterator[str]:
    """Yield the channels that a packet crosses, looking up one next hop after the other as a kernel would."""
    spaces = {space.name: space for space in layout.spaces}
    holders = {port.address: port for port in layout.ports.values()}
    here = spaces[start]
    for _ in range(len(spaces)):
        if here.name == end:
            return
        fits = [r for r in here.routes if r.target == target and r.source in (source, "")]
        route = max(fits, key=lambda route: bool(route.source))
        port = next(port for port in here.ports if port.interface == route.interface)
        yield layout.fabric.channels[port.channel].name
        peer = holders[route.via]
        assert peer.channel == port.channel ^ 1
        here = spaces[peer.space]
    raise AssertionError("the packet goes round in circles")


def test_addresses_and_interfaces_are_unique(layout: LabLayout) -> None:
    ports = list(layout.ports.values())
    assert len(ports) == 2 * len(layout.cables) == 2 * sum(link.parallel for link in layout.fabric.cluster.links)
    assert len({port.address for port in ports}) == len(ports)
    assert len({(port.space, port.interface) for port in ports}) == len(ports)
    assert all(port.address.startswith("10.") for port in ports)


def test_every_pair_takes_the_path_of_the_simulator(layout: LabLayout) -> None:
    fabric = layout.fabric
    for a, b in permutations(layout.seats, 2):
        if a.node == b.node:
            assert layout.path(a.rank, b.rank) == ()
            continue
        walked = tuple(follow(layout, a.address, b.address, a.node, b.node))
        assert walked == layout.path(a.rank, b.rank)
        row = find_paths(fabric, np.array([a.rank]), np.array([b.rank]), layout.rule)[0]
        names = [fabric.channels[channel].name for channel in row if channel != NO_CHANNEL]
        # Inside of a node the lab has no bus.
        assert walked == tuple(name for name in names if not _on_the_bus(name))


def _on_the_bus(name: str) -> bool:
    tail, head = (end.partition("/")[0] for end in name.split("->"))
    return tail == head


def test_one_device_for_each_node_goes_where_ecmp_says() -> None:
    fabric = Fabric(load_cluster("fat_tree:4"))
    layout = lay_out(fabric.cluster)
    assert layout.rule.leader == tuple(range(16))
    assert {len(layout.path(0, target)) for target in range(1, 16)} == {2, 4, 6}


def test_routes_by_source_are_there_where_ways_differ() -> None:
    rules = [BySource(choice) for choice in ((0, 0, 0, 0), (0, 1, 0, 1))]
    same, apart = (lay_out(load_cluster("leaf_spine:2x2"), rule) for rule in rules)
    assert not any(route.source for space in same.spaces for route in space.routes)
    assert any(route.source for space in apart.spaces for route in space.routes)
    assert same.path(0, 2) == ("n0->leaf0", "leaf0->spine0", "spine0->leaf1", "leaf1->n2")
    assert apart.path(1, 2) == ("n1->leaf0", "leaf0->spine1", "spine1->leaf1", "leaf1->n2")


def test_own_nics_have_their_addresses_and_shared_ones_share() -> None:
    layout = lay_out(OWN_AND_SHARED)
    addresses = [seat.address for seat in layout.seats]
    assert addresses[0] == addresses[1]
    assert len(set(addresses)) == 4
    assert [seat.interface for seat in layout.seats] == ["eth0", "eth0", "eth0", "eth1", "eth0"]
    assert [(seat.local_rank, seat.local_size, seat.node_index) for seat in layout.seats][2:] == [
        (0, 2, 1),
        (1, 2, 1),
        (0, 1, 2),
    ]
    (b,) = (space for space in layout.spaces if space.name == "b")
    assert Route(addresses[4], "eth1", layout.cables[2].far.address, addresses[3]) in b.routes


def test_only_what_forwards_forwards() -> None:
    assert {s.name: s.forwards for s in lay_out(load_cluster("star:2")).spaces} == {
        "hub": True,
        "n0": False,
        "n1": False,
    }
    assert all(space.forwards for space in lay_out(load_cluster("ring:3")).spaces)


def test_orders_name_everything_after_the_lab() -> None:
    layout = lay_out(load_cluster("star:2,rate=400Mbit"))
    assert add_namespaces(layout, "x") == "netns add mmx-x-hub\nnetns add mmx-x-n0\nnetns add mmx-x-n1\n"
    first = "link add name eth0 mtu 9000 netns mmx-x-n0 type veth peer name eth0 mtu 9000 netns mmx-x-hub"
    assert add_cables(layout, "x").splitlines()[0] == first
    script = configure_space(layout.spaces[0])
    assert "set_all 1 /proc/sys/net/ipv4/ip_forward" in script
    assert f"qdisc replace dev eth1 root {shape(50e6)}" in script
    assert namespace("x", "n0") == "mmx-x-n0"


@pytest.mark.parametrize("rate", [1e3, 1e6, 50e6, 12.5e9])
def test_the_bucket_gives_the_payload_the_rate(rate: float) -> None:
    words = shape(rate).split()
    assert int(words[2].removesuffix("bit")) * PAYLOAD == pytest.approx(rate * 8, rel=1e-3)
    burst, queue = int(words[4]), int(words[6])
    assert 4 * 9000 < burst < queue


@pytest.mark.parametrize(
    ("cluster", "sentence"),
    [
        (load_cluster("fat_tree:12"), "more than the 400 of a lab"),
        (Cluster("x", (Node("a b", (Device(),)),), (), ()), "cannot name a network namespace"),
        (
            Cluster("x", (Node("a", (Device(),), forwards=True),), (), (Link("a", "a/0", 1e6),)),
            "stays within one node",
        ),
        (Cluster("x", (Node("a", (Device(),)), Node("b", (Device(),))), (), ()), "cannot reach"),
    ],
)
def test_what_no_lab_can_be(cluster: Cluster, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        lay_out(cluster)


@pytest.mark.parametrize("text", ["1,1", "1,x,1", "0,1,1", "-1,1,1", "nan,1,1", "inf,1,1", ""])
def test_bad_quotas(text: str) -> None:
    with pytest.raises(UserError):
        parse_cpus(text, 3)


def test_quotas() -> None:
    assert parse_cpus("1,0.5,0.25", 3) == (1.0, 0.5, 0.25)


@pytest.mark.parametrize("name", ["", "a-b", "A", "a/b", "..", "x" * 33, "a*"])
def test_bad_names(name: str) -> None:
    with pytest.raises(UserError, match="cannot name a lab"):
        check_name(name)


def test_control_groups_of_both_versions(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io\n")
    two = f"cgroup2 {tmp_path} cgroup2 rw 0 0"
    one = "cgroup /x/cpu cgroup rw,relatime,cpu,cpuacct 0 0"
    none = "cgroup /x/memory cgroup rw,memory 0 0"
    assert cpu_cgroups([none]) is None
    found = cpu_cgroups([none, two, one])
    assert found is not None
    assert (found.version, found.root) == (1, Path("/x/cpu"))
    found = cpu_cgroups([two])
    assert found is not None
    found.add("mmx-x-n0", 0.25)
    assert (tmp_path / "mmx-x-n0" / "cpu.max").read_text() == "2500 10000"
    assert found.find("mmx-x-") == [tmp_path / "mmx-x-n0"]
