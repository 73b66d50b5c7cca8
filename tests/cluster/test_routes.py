"""Paths against a walker and a breadth-first search of our own, which know the cluster's values and nothing else."""

from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from itertools import pairwise, permutations, product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

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
from mimatrix.cluster import fabric as fabrics
from mimatrix.cluster.routes import NO_CHANNEL, find_paths
from mimatrix.core.errors import UserError

Steps = list[tuple[str, str]]


class Ways:
    """What a transfer may cross, said once more and from the cluster alone: one arc for each direction of a cable.

    Between devices of a node there is the bus, if it has one. All else goes outside: through the device's own NICs if
    it has any, otherwise through the host; then through switches and forwarding nodes only.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.node_of = {name: node for node in cluster.nodes for name in node.device_names()}
        self.cores = {switch.name for switch in cluster.switches} | {
            node.name for node in cluster.nodes if node.forwards
        }
        self.owners = {end for link in cluster.links for end in (link.a, link.b)} & set(self.node_of)

    def place(self, device: str) -> str:
        """Where the data of a device begins: without a bus and a NIC of its own, at the host."""
        node = self.node_of[device]
        return device if node.bus or device in self.owners else node.name

    def port(self, end: str) -> str:
        """Where a cable to `end` is plugged in: a device's own NIC is on its PCIe switch, if there is one."""
        node = self.node_of.get(end)
        return self.climb(end)[1] if node and node.bus and node.bus.fanout else end

    def climb(self, device: str) -> list[str]:
        node = self.node_of[device]
        local = int(device.rpartition("/")[2])
        if not node.bus:
            return [device]
        if not node.bus.fanout:
            return [device, node.name]
        return [device, f"{node.name}/pcie{local // node.bus.fanout}", node.name]

    def arcs(self, source: str, target: str) -> Counter[tuple[str, str]]:
        """Every arc that this transfer may take, with the number of cables side by side."""
        if self.node_of[source] is self.node_of[target] and self.node_of[source].bus:
            return Counter(_both_ways([*pairwise(self.climb(source)), *pairwise(self.climb(target))]))
        arcs: Counter[tuple[str, str]] = Counter()
        for link in self.cluster.links:
            if all(end in self.cores or end in self.doors(source, target) for end in (link.a, link.b)):
                for arc in _both_ways([(self.port(link.a), self.port(link.b))]):
                    arcs[arc] += link.parallel
        for device in (source, target):
            inner = list(pairwise(self.climb(device)))
            if device in self.owners:
                inner = [arc for arc in inner if arc[1] == self.port(device)]
            for arc in _both_ways(inner):
                arcs[arc] = 1
        return arcs

    def doors(self, source: str, target: str) -> set[str]:
        """Return the ends of the NICs that are theirs."""
        return {end if end in self.owners else self.node_of[end].name for end in (source, target)}

    def shortest(self, source: str, target: str) -> list[Steps]:
        """All shortest ways, as arcs; those over cables side by side only once. None at all where there is no way."""
        arcs = self.arcs(source, target)
        onward: dict[str, set[str]] = defaultdict(set)
        for tail, head in arcs:
            onward[tail].add(head)
        start, goal = self.place(source), self.place(target)
        if start == goal and start not in self.cores:
            # Two devices that only their host's NIC joins: out, and back in.
            return [[(start, core), (core, start)] for core in onward[start]]
        far = {start: 0}
        queue = deque([start])
        while queue:
            here = queue.popleft()
            for head in onward[here]:
                if head not in far:
                    far[head] = far[here] + 1
                    queue.append(head)
        return list(_unroll(start, goal, onward, far)) if goal in far else []

    def choices(self, source: str, target: str) -> int:
        """Return the number of shortest ways, with each cable counted."""
        arcs = self.arcs(source, target)
        return sum(int(np.prod([arcs[arc] for arc in steps])) for steps in self.shortest(source, target))


def _both_ways(arcs: Steps) -> set[tuple[str, str]]:
    return set(arcs) | {(head, tail) for tail, head in arcs}


def _unroll(here: str, goal: str, onward: dict[str, set[str]], far: dict[str, int]) -> Iterator[Steps]:
    if here == goal:
        yield []
    for head in onward[here]:
        if here != goal and far[head] == far[here] + 1 and far[head] <= far[goal]:
            yield from ([(here, head), *rest] for rest in _unroll(head, goal, onward, far))


class Paths:
    """Paths of a cluster by the names of devices, for tests to read."""

    def __init__(self, cluster: Cluster) -> None:
        self.fabric, self.ways = Fabric(cluster), Ways(cluster)
        self.number = {name: index for index, name in enumerate(cluster.device_names)}

    def channels(self, source: str, target: str, routes: Routes | None = None) -> tuple[int, ...]:
        pair = np.array([self.number[source]]), np.array([self.number[target]])
        (row,) = find_paths(self.fabric, *pair, routes or Ecmp())
        return tuple(row[row != NO_CHANNEL].tolist())

    def names(self, source: str, target: str, routes: Routes | None = None) -> list[str]:
        return [self.fabric.channels[channel].name for channel in self.channels(source, target, routes)]

    def steps(self, channels: tuple[int, ...]) -> Steps:
        """Return the arcs that the channels stand for: a device's own NIC is plugged into its PCIe switch."""
        found = []
        for channel in (self.fabric.channels[index] for index in channels):
            inside = channel.tail.partition("/")[0] == channel.head.partition("/")[0]
            found.append(
                (channel.tail, channel.head) if inside else (self.ways.port(channel.tail), self.ways.port(channel.head))
            )
        return found

    def check(self, source: str, target: str, channels: tuple[int, ...]) -> None:
        """Check that the channels are a shortest chain from source to target, through no other node's machine."""
        steps, ways = self.steps(channels), self.ways
        here = ways.place(source)
        for tail, head in steps:
            assert tail == here, f"{source} to {target}: at {here}, but next is {tail}->{head}"
            here = head
        assert here == ways.place(target)
        theirs = {*ways.climb(source), *ways.climb(target), ways.node_of[source].name, ways.node_of[target].name}
        for _, passed in steps[:-1]:
            assert passed in ways.cores | theirs, f"{source} to {target} passes through {passed}"
        assert steps in ways.shortest(source, target)


FAMILIES = [
    "star:3",
    "star:3,devices=3",
    "star:2,devices=4,fanout=2",
    "star:2,devices=4,fanout=2,nic=own",
    "leaf_spine:3x2",
    "leaf_spine:2x2,devices=2,nic=own",
    "fat_tree:4",
    "bigraph:2x2",
    "bigraph:2x2,parallel=3,devices=4,nic=own",
    "ring:1",
    "ring:2,devices=2",
    "ring:6",
    "torus:3x4",
    "torus:2x2x2,devices=2,bus=1GB,fanout=1",
]


@pytest.mark.parametrize("word", FAMILIES)
@pytest.mark.parametrize("routes", [Ecmp(0), Ecmp(7), BySource(tuple(range(64)))])
def test_every_pair_of_every_family(word: str, routes: Routes) -> None:
    paths = Paths(topology_from_name(word))
    for source, target in product(paths.number, repeat=2):
        if source != target:
            paths.check(source, target, paths.channels(source, target, routes))


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    """Nodes of every make and switches, cabled at random: lost parts, dual-homed nodes and parallel cables included."""
    buses = st.none() | st.builds(Bus, st.just(1e9), st.just(0.0), st.integers(0, 3))
    drawn = [(draw(st.integers(1, 3)), draw(buses), draw(st.booleans())) for _ in range(draw(st.integers(1, 4)))]
    # Several devices of a node that forwards must have a bus.
    nodes = tuple(
        Node(f"n{index}", (Device(),) * count, bus, forwards and (count == 1 or bus is not None))
        for index, (count, bus, forwards) in enumerate(drawn)
    )
    switches = tuple(Switch(f"s{index}") for index in range(draw(st.integers(0, 4))))
    cores = [switch.name for switch in switches] + [node.name for node in nodes if node.forwards]
    others = [node.name for node in nodes if not node.forwards] + [name for n in nodes for name in n.device_names()]
    pairs = [pair for pair in product(cores, cores + others) if pair[0] != pair[1].partition("/")[0]]
    if not pairs:
        return Cluster("random", nodes, switches, ())
    ends = st.sampled_from(pairs).flatmap(st.permutations)
    links = st.builds(lambda pair, parallel: Link(pair[0], pair[1], 1e9, 0.0, parallel), ends, st.integers(1, 2))
    return Cluster("random", nodes, switches, tuple(draw(st.lists(links, max_size=10))))


@settings(deadline=None, max_examples=100)
@given(clusters(), st.integers(0, 99))
def test_every_pair_of_random_clusters(cluster: Cluster, seed: int) -> None:
    paths = Paths(cluster)
    found: dict[tuple[str, str], tuple[int, ...]] = {}
    for source, target in permutations(paths.number, 2):
        if paths.ways.shortest(source, target):
            found[source, target] = paths.channels(source, target, Ecmp(seed))
            paths.check(source, target, found[source, target])
        else:
            with pytest.raises(UserError, match=f"^{source} cannot reach {target} in random; add a "):
                paths.channels(source, target, Ecmp(seed))
    # All at once gives what one by one gave.
    numbers = np.array([(paths.number[a], paths.number[b]) for a, b in found], dtype=np.int64).reshape(-1, 2)
    rows = find_paths(paths.fabric, numbers[:, 0], numbers[:, 1], Ecmp(seed))
    assert [tuple(row[row != NO_CHANNEL].tolist()) for row in rows] == list(found.values())


@settings(deadline=None, max_examples=60)
@given(clusters())
def test_channels_are_the_cables(cluster: Cluster) -> None:
    fabric, ways = Fabric(cluster), Ways(cluster)
    wanted: Counter[str] = Counter()
    for link in cluster.links:
        for tail, head in ((link.a, link.b), (link.b, link.a)):
            wanted[f"{tail}->{head}"] += link.parallel
    rungs = {arc for device in cluster.device_names for arc in _both_ways(list(pairwise(ways.climb(device))))}
    wanted.update(f"{tail}->{head}" for tail, head in rungs)
    assert Counter(channel.name for channel in fabric.channels) == wanted


def test_channels_are_as_fast_as_their_cables() -> None:
    nodes = (Node("a", (Device(),) * 2, Bus(3e9, 3e-6, 1)), Node("b", (Device(),)))
    links = (Link("s", "a", 1e9, 1e-6), Link("b/0", "s", 2e9, 2e-6, 2))
    fabric = Fabric(Cluster("x", nodes, (Switch("s"),), links))
    speeds = {(channel.name, channel.rate_bytes_per_s, channel.latency_s) for channel in fabric.channels}
    assert speeds == {
        *((name, 1e9, 1e-6) for name in ("a->s", "s->a")),
        *((name, 2e9, 2e-6) for name in ("b/0->s", "s->b/0")),
        *((name, 3e9, 3e-6) for name in ("a/0->a/pcie0", "a/pcie0->a/0", "a/pcie0->a", "a->a/pcie0")),
        *((name, 3e9, 3e-6) for name in ("a/1->a/pcie1", "a/pcie1->a/1", "a/pcie1->a", "a->a/pcie1")),
    }
    assert fabric.rates.tolist() == [channel.rate_bytes_per_s for channel in fabric.channels]
    assert fabric.latencies.tolist() == [channel.latency_s for channel in fabric.channels]


def test_no_pairs_give_no_paths() -> None:
    none = np.array([], dtype=np.int64)
    assert find_paths(Fabric(topology_from_name("star:2")), none, none, Ecmp()).shape[0] == 0


def test_to_itself_there_is_nothing_to_cross() -> None:
    for word in ("star:2", "star:2,devices=2", "ring:3"):
        fabric = Fabric(topology_from_name(f"{word},bus=1GB"))
        rows = find_paths(fabric, np.array([1, 0]), np.array([1, 0]), Ecmp())
        assert (rows == NO_CHANNEL).all()


class TestEcmp:
    SPINES, LEAVES = 8, 2
    WORD = f"leaf_spine:{LEAVES}x{SPINES}"

    def spines(self, seed: int) -> list[str]:
        """Return the spine of every pair from the first leaf to the second, in order."""
        fabric = Fabric(topology_from_name(self.WORD))
        sources, targets = np.divmod(np.arange(self.SPINES**2), self.SPINES)
        rows = find_paths(fabric, sources, targets + self.SPINES, Ecmp(seed))
        return [fabric.channels[row[1]].head for row in rows]

    def test_the_same_seed_picks_the_same(self) -> None:
        assert self.spines(5) == self.spines(5)

    def test_another_seed_picks_otherwise(self) -> None:
        seeds = [0, 1, 2, 3, 1000, 2**31, 2**63, -1, -2, 10**30]
        picked = [self.spines(seed) for seed in seeds]
        for one, other in permutations(picked, 2):
            same = sum(a == b for a, b in zip(one, other, strict=True))
            assert same < 30, "of 64 pairs, 8 agree by chance"

    def test_spines_are_picked_evenly(self) -> None:
        seeds = 40
        counts = Counter(spine for seed in range(seeds) for spine in self.spines(seed))
        mean = seeds * self.SPINES**2 / self.SPINES
        # Five standard deviations of a fair pick; the hash is fixed, so this passes always or never.
        assert len(counts) == self.SPINES
        assert max(abs(count - mean) for count in counts.values()) < 5 * mean**0.5

    def test_one_seed_spreads_the_pairs_but_collides_as_chance_does(self) -> None:
        for seed in range(5):
            counts = Counter(self.spines(seed))
            assert len(counts) == self.SPINES
            assert 1 < max(counts.values()) - min(counts.values()) < 16

    def test_there_and_back_are_picked_apart(self) -> None:
        paths = Paths(topology_from_name(self.WORD))
        pairs = list(product([f"n{i}/0" for i in range(8)], [f"n{i}/0" for i in range(8, 16)]))
        same = sum(paths.names(a, b)[1].split("->")[1] == paths.names(b, a)[1].split("->")[1] for a, b in pairs)
        assert 0 < same < 24, "of 64 pairs, 8 agree by chance"

    @pytest.mark.parametrize(
        ("word", "source", "target", "count"),
        [
            ("fat_tree:4", "n0/0", "n15/0", 4),
            ("fat_tree:4", "n0/0", "n2/0", 2),
            ("fat_tree:4", "n0/0", "n1/0", 1),
            ("bigraph:2x1", "n0/0", "n1/0", 2),
            ("bigraph:2x1,parallel=2", "n0/0", "n1/0", 8),
            ("bigraph:2x1,parallel=3", "n0/0", "n2/0", 3),
            ("torus:3x3", "n0/0", "n4/0", 2),
            ("torus:4x4", "n0/0", "n10/0", 24),
            ("ring:6", "n0/0", "n3/0", 2),
        ],
    )
    def test_every_equal_path_is_taken_and_none_is_preferred(
        self, word: str, source: str, target: str, count: int
    ) -> None:
        paths = Paths(topology_from_name(word))
        assert paths.ways.choices(source, target) == count
        seeds = 30 * count
        taken = Counter(paths.channels(source, target, Ecmp(seed)) for seed in range(seeds))
        assert len(taken) == count
        if word != "torus:4x4":
            # Per hop, as switches do, is even over paths only where every switch has equally many below it.
            assert max(abs(times - 30) for times in taken.values()) < 5 * 30**0.5


@settings(deadline=None, max_examples=25)
@given(clusters(), st.data())
def test_all_equal_paths_of_random_clusters_are_taken(cluster: Cluster, data: st.DataObject) -> None:
    paths = Paths(cluster)
    pairs = [pair for pair in permutations(paths.number, 2) if 2 <= paths.ways.choices(*pair) <= 6]
    assume(pairs)
    source, target = data.draw(st.sampled_from(pairs))
    taken = {paths.channels(source, target, Ecmp(seed)) for seed in range(300)}
    assert len(taken) == paths.ways.choices(source, target)


class TestBySource:
    def test_the_source_picks_the_spine(self) -> None:
        paths = Paths(topology_from_name("leaf_spine:3x4"))
        choice = (3, 2, 1, 0, 5, 6, 7, 4, 0, 0, 0, 0)
        for source, target in permutations(range(12), 2):
            names = paths.names(f"n{source}/0", f"n{target}/0", BySource(choice))
            if source // 4 == target // 4:
                assert names == [f"n{source}->leaf{source // 4}", f"leaf{target // 4}->n{target}"]
            else:
                spine = f"spine{choice[source] % 4}"
                assert names[1:3] == [f"leaf{source // 4}->{spine}", f"{spine}->leaf{target // 4}"]

    def test_the_source_picks_the_cable(self) -> None:
        paths = Paths(topology_from_name("bigraph:1x1,parallel=3"))
        picked = [paths.channels("n0/0", "n1/0", BySource((choice, 0))) for choice in range(6)]
        assert len(set(picked[:3])) == 3
        assert picked[3:] == picked[:3]

    def test_the_source_picks_its_nic(self) -> None:
        nodes = (Node("a", (Device(),)), Node("b", (Device(),)))
        links = (Link("a", "s", 1e9), Link("a", "t", 1e9), Link("b", "s", 1e9), Link("b", "t", 1e9))
        paths = Paths(Cluster("x", nodes, (Switch("s"), Switch("t")), links))
        assert paths.names("a/0", "b/0", BySource((0, 0))) == ["a->s", "s->b"]
        assert paths.names("a/0", "b/0", BySource((1, 0))) == ["a->t", "t->b"]


def test_bigraph_opposite_sides_are_one_link_apart() -> None:
    """What HDRM relies on: between the sides there is one way, whatever the rule."""
    paths = Paths(topology_from_name("bigraph:3x2"))
    side = {f"n{index}/0": "upper" if index < 6 else "lower" for index in range(12)}
    home = {f"n{index}/0": f"{'upper' if index < 6 else 'lower'}{index % 6 // 2}" for index in range(12)}
    for source, target in permutations(side, 2):
        names = {tuple(paths.names(source, target, Ecmp(seed))) for seed in range(30)}
        a, b = source[:-2], target[:-2]
        if side[source] != side[target]:
            assert names == {(f"{a}->{home[source]}", f"{home[source]}->{home[target]}", f"{home[target]}->{b}")}
        elif home[source] == home[target]:
            assert names == {(f"{a}->{home[source]}", f"{home[target]}->{b}")}
        else:
            middles = {path[1].partition("->")[2] for path in names}
            other = "lower" if side[source] == "upper" else "upper"
            assert all(len(path) == 4 for path in names)
            assert middles == {f"{other}{index}" for index in range(3)}


def test_the_bus_joins_devices_of_a_node() -> None:
    flat = Paths(topology_from_name("star:1,devices=4"))
    assert flat.names("n0/0", "n0/3") == ["n0/0->n0", "n0->n0/3"]
    tree = Paths(topology_from_name("star:1,devices=5,fanout=2"))
    assert tree.names("n0/0", "n0/1") == ["n0/0->n0/pcie0", "n0/pcie0->n0/1"]
    assert tree.names("n0/1", "n0/4") == ["n0/1->n0/pcie0", "n0/pcie0->n0", "n0->n0/pcie2", "n0/pcie2->n0/4"]


def test_the_bus_is_taken_even_by_devices_with_nics() -> None:
    paths = Paths(topology_from_name("star:1,devices=2,nic=own"))
    assert paths.names("n0/0", "n0/1") == ["n0/0->n0", "n0->n0/1"]


def test_without_a_bus_devices_of_a_node_meet_outside() -> None:
    shared = Cluster("x", (Node("a", (Device(),) * 2),), (Switch("s"),), (Link("a", "s", 1e9),))
    assert Paths(shared).names("a/0", "a/1") == ["a->s", "s->a"]
    links = (Link("a/0", "s", 1e9), Link("a/1", "s", 1e9))
    own = Cluster("x", (Node("a", (Device(),) * 2),), (Switch("s"),), links)
    assert Paths(own).names("a/0", "a/1") == ["a/0->s", "s->a/1"]


def test_a_nic_of_its_own_is_on_the_pcie_switch() -> None:
    paths = Paths(topology_from_name("star:2,devices=4,fanout=2,nic=own"))
    assert paths.names("n0/1", "n1/2") == ["n0/1->n0/pcie0", "n0/1->hub", "hub->n1/2", "n1/pcie1->n1/2"]
    shared = Paths(topology_from_name("star:2,devices=4,fanout=2"))
    assert shared.names("n0/1", "n1/2") == [
        "n0/1->n0/pcie0",
        "n0/pcie0->n0",
        "n0->hub",
        "hub->n1",
        "n1->n1/pcie1",
        "n1/pcie1->n1/2",
    ]


def chain(*extra: Link, middle_forwards: bool = False) -> Cluster:
    """Return a - s - middle - t - b, where a reaches b only if `middle` forwards or another link leads round."""
    nodes = (Node("a", (Device(),)), Node("middle", (Device(),), Bus(1e9), middle_forwards), Node("b", (Device(),)))
    links = (Link("a", "s", 1e9), Link("middle", "s", 1e9), Link("middle", "t", 1e9), Link("b", "t", 1e9))
    return Cluster("x", nodes, tuple(map(Switch, ("s", "t", "u", "v"))), (*links, *extra))


def test_nodes_that_do_not_forward_are_not_passed_through() -> None:
    with pytest.raises(UserError, match="a/0 cannot reach b/0"):
        Paths(chain()).names("a/0", "b/0")
    assert Paths(chain(middle_forwards=True)).names("a/0", "b/0") == ["a->s", "s->middle", "middle->t", "t->b"]
    detour = (Link("s", "u", 1e9), Link("u", "v", 1e9), Link("v", "t", 1e9))
    assert Paths(chain(*detour)).names("a/0", "b/0") == ["a->s", "s->u", "u->v", "v->t", "t->b"]


def test_a_dual_homed_node_uses_the_nearer_nic() -> None:
    paths = Paths(chain(Link("s", "u", 1e9), Link("u", "t", 1e9)))
    for seed in range(20):
        assert paths.names("middle/0", "a/0", Ecmp(seed)) == ["middle/0->middle", "middle->s", "s->a"]
        assert paths.names("middle/0", "b/0", Ecmp(seed)) == ["middle/0->middle", "middle->t", "t->b"]
        assert paths.names("b/0", "middle/0", Ecmp(seed)) == ["b->t", "t->middle", "middle->middle/0"]


def test_equally_near_nics_are_both_used() -> None:
    nodes = (Node("a", (Device(),)), Node("b", (Device(),)))
    paths = Paths(Cluster("x", nodes, (Switch("s"),), (Link("a", "s", 1e9, parallel=2), Link("b", "s", 1e9))))
    taken = Counter(paths.channels("a/0", "b/0", Ecmp(seed)) for seed in range(100))
    assert sorted(taken.values())[0] > 25
    assert len(taken) == 2


def test_the_unreachable_are_both_named() -> None:
    nodes = tuple(Node(name, (Device(),)) for name in ("near", "far", "bare"))
    fabric = Fabric(
        Cluster("split", nodes, (Switch("s"), Switch("t")), (Link("near", "s", 1e9), Link("far", "t", 1e9)))
    )
    with pytest.raises(UserError) as caught:
        find_paths(fabric, np.array([0, 0, 1]), np.array([0, 1, 2]), Ecmp())
    assert str(caught.value).startswith("near/0 cannot reach far/0 in split; add a [[link]] ")
    with pytest.raises(UserError, match="far/0 cannot reach bare/0 in split"):
        find_paths(fabric, np.array([1]), np.array([2]), Ecmp())


def test_more_cores_than_distances_are_kept_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fabrics, "MOST_CORES", 5)
    assert len(Paths(topology_from_name("ring:5")).names("n0/0", "n2/0")) == 2
    with pytest.raises(UserError, match=r"^ring:6 has 6 switches and nodes that forward, .*; use a smaller one$"):
        Paths(topology_from_name("ring:6")).names("n0/0", "n2/0")


def test_no_switches_and_no_links() -> None:
    alone = Fabric(Cluster("x", (Node("a", (Device(),) * 2, Bus(1e9)), Node("b", (Device(),))), (), ()))
    assert find_paths(alone, np.array([0]), np.array([1]), Ecmp()).tolist() == [[0, 3]]
    with pytest.raises(UserError, match="a/1 cannot reach b/0"):
        find_paths(alone, np.array([0, 1]), np.array([1, 2]), Ecmp())


@pytest.mark.parametrize(("a", "b"), [("a", "b"), ("a/0", "b"), ("a", "b/0"), ("a/0", "b/0"), ("a", "a/0")])
def test_cables_between_machines_that_do_not_forward(a: str, b: str) -> None:
    cluster = Cluster("x", (Node("a", (Device(),)), Node("b", (Device(),))), (), (Link(a, b, 1e9),))
    with pytest.raises(UserError, match=f"^the link {a} - {b} joins two machines that do not forward; put a switch "):
        Fabric(cluster)
