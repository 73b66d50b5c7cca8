"""ClusterSummary against closed forms, and on small clusters against counting everything."""

import math
from collections import deque
from itertools import combinations, product

import pytest

from mimatrix.cluster import Bus, Cluster, Device, Fabric, Link, Node, Switch, topology_from_name
from mimatrix.cluster.summary import ClusterSummary, summarize

RATE = 12.5e9
GPU = (Device(),)
SMALL = [
    "star:5",
    "star:4,rate=2*40Gbit+2*10Gbit",
    "leaf_spine:2x2",
    "leaf_spine:3x2,oversubscription=2",
    "bigraph:2x2",
    "ring:6",
    "ring:7",
    "torus:2x4",
    "torus:3x3",
]
OF_MANY_DEVICES = [
    "leaf_spine:3x2,devices=2",
    "fat_tree:4,devices=2,nic=own",
    "bigraph:2x4,devices=4,nic=own,fanout=1",
    "bigraph:3x2,devices=3",
    "ring:5,devices=2",
    "torus:3x4",
    "star:1,devices=8",
]


def of(word: str) -> ClusterSummary:
    return summarize(Fabric(topology_from_name(word)))


def two_racks(*trunks: Link) -> Cluster:
    """Two switches with two nodes each, and what joins them."""
    nodes = tuple(Node(f"n{index}", GPU) for index in range(4))
    nics = tuple(Link(f"n{index}", "ab"[index // 2], RATE) for index in range(4))
    return Cluster("two racks", nodes, (Switch("a"), Switch("b")), (*nics, *trunks))


@pytest.mark.parametrize("nodes", [2, 7, 8, 100])
def test_star(nodes: int) -> None:
    found = of(f"star:{nodes}")
    assert (found.nodes, found.devices, found.switches) == (nodes, nodes, 1)
    assert (found.nic_cables, found.trunk_cables) == (nodes, 0)
    assert (found.most_hops, found.mean_hops, found.unreachable) == (1, 1, None)
    assert found.bisection_bytes_per_s == found.full_bisection_bytes_per_s == nodes // 2 * RATE
    assert found.bisection_ratio == 1
    assert found.oversubscribed == ()


@pytest.mark.parametrize("ratio", [1, 2, 3, 4])
def test_leaf_spine_is_as_narrow_as_it_is_oversubscribed(ratio: int) -> None:
    found = of(f"leaf_spine:4x8,oversubscription={ratio}")
    assert found.most_hops == 3
    assert found.mean_hops == pytest.approx((7 * 1 + 24 * 3) / 31)
    assert found.bisection_bytes_per_s == pytest.approx(16 * RATE / ratio)
    assert found.bisection_ratio == pytest.approx(1 / ratio)
    narrow = [f"leaf{index}" for index in range(4)] if ratio > 1 else []
    assert [each.name for each in found.oversubscribed] == narrow
    assert [each.ratio for each in found.oversubscribed] == pytest.approx([ratio] * len(narrow))


@pytest.mark.parametrize("k", [2, 4, 6, 8])
def test_fat_tree_has_full_bisection(k: int) -> None:
    found = of(f"fat_tree:{k}")
    half, devices = k // 2, k**3 // 4
    assert found.devices == devices
    assert found.bisection_bytes_per_s == found.full_bisection_bytes_per_s == devices // 2 * RATE
    assert found.oversubscribed == ()
    edge, pod = half - 1, half * (half - 1)
    assert found.mean_hops == pytest.approx((edge * 1 + pod * 3 + (devices - 1 - edge - pod) * 5) / (devices - 1))
    assert found.most_hops == 5


@pytest.mark.parametrize(("side", "ports", "parallel"), [(2, 2, 1), (4, 4, 1), (4, 8, 1), (3, 2, 2), (8, 4, 3)])
def test_bigraph(side: int, ports: int, parallel: int) -> None:
    found = of(f"bigraph:{side}x{ports},parallel={parallel}")
    assert found.devices == 2 * side * ports
    assert found.most_hops == 3
    assert found.trunk_cables == side * side * parallel
    near, far, across = ports - 1, (side - 1) * ports, side * ports
    assert found.mean_hops == pytest.approx((near * 1 + far * 3 + across * 2) / (found.devices - 1))
    # Between the groups cross all cables of the one to the other, unless NICs are fewer.
    assert found.bisection_bytes_per_s <= min(side * side * parallel, side * ports) * RATE
    assert bool(found.oversubscribed) == (ports > side * parallel)


def test_bigraph_is_narrower_across_its_groups_than_between_them() -> None:
    found = of("bigraph:4x4")
    # Half of the switches of both groups: of 16 cables, 8 join a switch of one half to one of the other.
    assert found.bisection_bytes_per_s == 8 * RATE
    assert found.bisection_ratio == 0.5
    assert found.split == "switches in turn"


@pytest.mark.parametrize("nodes", [3, 4, 8, 9])
def test_ring(nodes: int) -> None:
    found = of(f"ring:{nodes}")
    assert (found.switches, found.nic_cables, found.trunk_cables) == (0, 0, nodes)
    assert found.most_hops == nodes // 2 - 1
    assert found.bisection_bytes_per_s == 2 * RATE
    assert found.full_bisection_bytes_per_s == nodes // 2 * 2 * RATE


@pytest.mark.parametrize(("rows", "columns"), [(4, 4), (4, 8), (8, 4), (6, 10), (3, 22)])
def test_torus_is_cut_across_its_longer_side(rows: int, columns: int) -> None:
    found = of(f"torus:{rows}x{columns}")
    assert found.trunk_cables == 2 * rows * columns
    assert found.most_hops == rows // 2 + columns // 2 - 1
    assert found.bisection_bytes_per_s == 2 * min(rows, columns) * RATE


@pytest.mark.parametrize("word", SMALL)
def test_bisection_of_small_clusters_is_the_true_one(word: str) -> None:
    cluster = topology_from_name(word)
    assert summarize(Fabric(cluster)).bisection_bytes_per_s == pytest.approx(true_bisection(cluster))


def true_bisection(cluster: Cluster) -> float:
    """Return the least rate between halves of the nodes, over all halves and all sides that switches can be on."""
    nodes, switches = [node.name for node in cluster.nodes], [switch.name for switch in cluster.switches]
    least = math.inf
    for half in combinations(nodes, len(nodes) // 2):
        for sides in product((False, True), repeat=len(switches)):
            inside = {*half, *(switch for switch, side in zip(switches, sides, strict=True) if side)}
            crossing = [link for link in cluster.links if (link.a in inside) != (link.b in inside)]
            least = min(least, sum(link.rate_bytes_per_s * link.parallel for link in crossing))
    return least


@pytest.mark.parametrize("word", OF_MANY_DEVICES)
def test_hops_are_those_of_a_search_from_every_device(word: str) -> None:
    cluster = topology_from_name(word)
    counted = hops_by_search(cluster)
    found = summarize(Fabric(cluster))
    assert found.most_hops == max(counted, default=0)
    assert found.mean_hops == pytest.approx(sum(counted) / max(1, len(counted)))


def hops_by_search(cluster: Cluster) -> list[int]:
    """For every ordered pair of devices of different nodes, the forwarding things between them."""
    forwards = {switch.name for switch in cluster.switches} | {node.name for node in cluster.nodes if node.forwards}
    joined: dict[str, set[str]] = {}
    for link in cluster.links:
        joined.setdefault(link.a, set()).add(link.b)
        joined.setdefault(link.b, set()).add(link.a)
    homes = [
        (node.name, name if name in joined else node.name) for node in cluster.nodes for name in node.device_names()
    ]
    hops = []
    for node, start in homes:
        distance, queue = {start: 0}, deque([start])
        while queue:
            here = queue.popleft()
            for there in joined.get(here, set()) - distance.keys():
                distance[there] = distance[here] + 1
                if there in forwards:
                    queue.append(there)
        hops += [distance[end] - 1 for other, end in homes if other != node]
    return hops


def test_shared_nic_is_named_with_its_reason() -> None:
    found = of("leaf_spine:2x2,devices=8")
    assert [each.name for each in found.oversubscribed] == ["n0", "n1", "n2", "n3"]
    assert found.oversubscribed[0].reason == "8 devices share one NIC of 100Gbit: 10.2 to 1"
    assert found.oversubscribed[0].ratio == pytest.approx(8 * 16e9 / RATE)
    # The NIC counts once, however many devices share it.
    assert found.full_bisection_bytes_per_s == 2 * RATE


def test_own_nics_are_not_oversubscribed() -> None:
    found = of("leaf_spine:2x2,devices=4,nic=own,fanout=1")
    assert found.oversubscribed == ()
    assert found.nic_cables == 16
    assert found.bisection_bytes_per_s == found.full_bisection_bytes_per_s == 8 * RATE


def test_pcie_switches_narrow_what_reaches_a_shared_nic() -> None:
    assert of("star:2,devices=8,fanout=4").oversubscribed[0].ratio == pytest.approx(2 * 16e9 / RATE)


def test_cables_of_a_forwarding_node_are_its_nics() -> None:
    reason = of("ring:4,devices=4").oversubscribed[0].reason
    assert reason == "4 devices share 2 NICs of 200Gbit together: 2.56 to 1"


def test_devices_without_a_bus_could_each_fill_the_nic() -> None:
    nodes = (Node("n0", GPU * 3), Node("n1", GPU))
    cluster = Cluster("no bus", nodes, (Switch("s"),), (Link("n0", "s", RATE), Link("n1", "s", RATE)))
    found = summarize(Fabric(cluster))
    assert [(each.name, each.ratio) for each in found.oversubscribed] == [("n0", 3.0)]


def test_halves_of_one_node_meet_on_its_bus() -> None:
    found = of("star:1,devices=8")
    assert found.bisection_bytes_per_s == found.full_bisection_bytes_per_s == 4 * 16e9
    assert (found.most_hops, found.mean_hops) == (0, 0)


def test_half_a_node_sends_over_its_bus_and_its_nic() -> None:
    # The middle one of three nodes is cut: 3 GB/s cross on its bus, and 1 GB/s to the node that is whole.
    nodes = tuple(Node(f"n{index}", GPU * 2, Bus(3e9)) for index in range(3))
    cluster = Cluster("cut", nodes, (Switch("s"),), tuple(Link(f"n{index}", "s", 1e9) for index in range(3)))
    assert summarize(Fabric(cluster)).bisection_bytes_per_s == 4e9


def test_one_device_has_nothing_to_bisect() -> None:
    found = of("star:1")
    assert (found.bisection_bytes_per_s, found.full_bisection_bytes_per_s, found.bisection_ratio) == (0, 0, 1)


def test_parallel_cables_are_counted_and_carry() -> None:
    found = summarize(Fabric(two_racks(Link("a", "b", RATE / 4, parallel=3))))
    assert (found.nic_cables, found.trunk_cables) == (4, 3)
    assert found.bisection_bytes_per_s == pytest.approx(0.75 * RATE)
    assert found.oversubscribed[0].reason == "200Gbit to its devices, 75Gbit to other switches: 2.67 to 1"


def test_slow_cable_beside_uneven_fast_ones_is_exact() -> None:
    slow = 1e6 / 3
    assert summarize(Fabric(two_racks(Link("a", "b", slow)))).bisection_bytes_per_s == pytest.approx(slow, rel=1e-12)


def test_cluster_in_two_parts() -> None:
    found = summarize(Fabric(two_racks()))
    assert (found.most_hops, found.mean_hops) == (math.inf, math.inf)
    assert found.unreachable == ("n0/0", "n2/0")
    assert (found.bisection_bytes_per_s, found.bisection_ratio) == (0, 0)
    assert found.full_bisection_bytes_per_s == 2 * RATE
    assert found.oversubscribed == ()


def test_nodes_with_no_link_at_all() -> None:
    found = summarize(Fabric(Cluster("loose", (Node("n0", GPU), Node("n1", GPU)), (), ())))
    assert found.unreachable == ("n0/0", "n1/0")
    assert found.bisection_ratio == 0


def test_devices_of_one_node_need_not_reach_one_another() -> None:
    links = (Link("n0/0", "s", RATE), Link("n1", "s", RATE))
    cluster = Cluster("part", (Node("n0", GPU * 2), Node("n1", GPU)), (Switch("s"),), links)
    assert summarize(Fabric(cluster)).unreachable in (("n0/1", "n1/0"), ("n1/0", "n0/1"))


@pytest.mark.timeout(40)
@pytest.mark.parametrize(("word", "hops", "crossing"), [("fat_tree:16", 5, 512), ("torus:32x32", 31, 64)])
def test_a_thousand_devices(word: str, hops: int, crossing: int) -> None:
    found = of(word)
    assert found.devices == 1024
    assert found.most_hops == hops
    assert found.bisection_bytes_per_s == crossing * RATE


@pytest.mark.timeout(60)
def test_four_thousand_devices() -> None:
    found = of("leaf_spine:64x8,devices=8,nic=own,fanout=1,oversubscription=3")
    assert found.devices == 4096
    assert found.most_hops == 3
    assert found.bisection_ratio == pytest.approx(1 / 3)
