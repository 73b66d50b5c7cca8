"""Every family against its closed forms, every form of its word, and every word that is wrong."""

from collections import Counter
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimatrix.cluster import FAMILIES, Bus, Cluster, Link, topologies, topology_from_name
from mimatrix.cluster.model import MOST_PARTS
from mimatrix.cluster.topologies import (
    DEFAULT_LATENCY_S,
    DEFAULT_RATE,
    PCIE_BYTES_PER_S,
    Server,
    leaf_spine,
    ring,
    star,
    torus,
)
from mimatrix.core.errors import UserError

G = 1e9 / 8


def cables(cluster: Cluster, first: str, second: str = "") -> list[Link]:
    """Return the links between two groups of switches, or between a group and machines."""
    group = {switch.name: switch.group for switch in cluster.switches}
    return [
        link
        for link in cluster.links
        if sorted((group.get(link.a, ""), group.get(link.b, ""))) == sorted((first, second))
    ]


def groups(cluster: Cluster) -> dict[str, int]:
    return dict(Counter(switch.group for switch in cluster.switches))


def rate_on(links: list[Link], end: str) -> float:
    return sum(link.rate_bytes_per_s * link.parallel for link in links if end in (link.a, link.b))


@pytest.mark.parametrize("nodes", [1, 2, 7, 100])
def test_star(nodes: int) -> None:
    cluster = topology_from_name(f"star:{nodes}")
    assert groups(cluster) == {"leaf": 1}
    assert [node.name for node in cluster.nodes] == [f"n{index}" for index in range(nodes)]
    assert [(link.a, link.b) for link in cluster.links] == [(f"n{index}", "hub") for index in range(nodes)]


@pytest.mark.parametrize(("leaves", "nodes"), [(1, 1), (2, 3), (4, 8), (5, 2)])
def test_leaf_spine(leaves: int, nodes: int) -> None:
    cluster = topology_from_name(f"leaf_spine:{leaves}x{nodes}")
    assert groups(cluster) == {"leaf": leaves, "spine": nodes}
    assert len(cluster.nodes) == leaves * nodes
    assert Counter(link.b for link in cables(cluster, "leaf")) == {f"leaf{index}": nodes for index in range(leaves)}
    ups = cables(cluster, "leaf", "spine")
    assert len({(link.a, link.b) for link in ups}) == len(ups) == leaves * nodes
    assert len(cluster.links) == 2 * leaves * nodes


@pytest.mark.parametrize("over", [1, 1.5, 2, 3, 4, 8, 1000])
@pytest.mark.parametrize("spines", [None, 1, 3])
def test_leaf_spine_carries_up_what_oversubscription_says(over: float, spines: int | None) -> None:
    word = f"leaf_spine:3x8,rate=40Gbit,oversubscription={over}" + (f",spines={spines}" if spines else "")
    cluster = topology_from_name(word)
    ups = cables(cluster, "leaf", "spine")
    assert groups(cluster)["spine"] == (spines or max(1, round(8 / over)))
    for leaf in ("leaf0", "leaf1", "leaf2"):
        assert rate_on(ups, leaf) == pytest.approx(8 * 40 * G / over)


@pytest.mark.parametrize("k", [2, 4, 6, 8])
def test_fat_tree(k: int) -> None:
    cluster = topology_from_name(f"fat_tree:{k}")
    assert groups(cluster) == {"core": k * k // 4, "aggregation": k * k // 2, "edge": k * k // 2}
    assert len(cluster.nodes) == len(cables(cluster, "edge")) == k**3 // 4
    assert len(cables(cluster, "edge", "aggregation")) == len(cables(cluster, "aggregation", "core")) == k**3 // 4
    assert len(cluster.links) == 3 * k**3 // 4
    ports = Counter(end for link in cluster.links for end in (link.a, link.b))
    assert {ports[switch.name] for switch in cluster.switches} == {k}
    # Every core reaches every pod once.
    for core in range(k // 2):
        pods = {link.a.partition("-")[0] for link in cluster.links if link.b == f"core{core}-0"}
        assert len(pods) == k


@pytest.mark.parametrize(("switches", "endpoints", "parallel"), [(1, 1, 1), (2, 3, 1), (4, 4, 2), (3, 1, 5)])
def test_bigraph(switches: int, endpoints: int, parallel: int) -> None:
    cluster = topology_from_name(f"bigraph:{switches}x{endpoints},parallel={parallel}")
    assert groups(cluster) == {"upper": switches, "lower": switches}
    assert len(cluster.nodes) == 2 * switches * endpoints
    across = cables(cluster, "upper", "lower")
    assert len({(link.a, link.b) for link in across}) == len(across) == switches**2
    assert {link.parallel for link in across} == {parallel}
    assert len(cluster.links) == switches**2 + 2 * switches * endpoints
    ports = Counter(link.b for link in cables(cluster, "upper") + cables(cluster, "lower"))
    assert ports == {switch.name: endpoints for switch in cluster.switches}
    # Servers are numbered switch by switch, the upper side first.
    plugged = [link.b for link in cluster.links if cluster.kind_of[link.a] == "node"]
    assert plugged == [switch.name for switch in cluster.switches for _ in range(endpoints)]


def test_bigraph_with_a_nic_for_each_device() -> None:
    cluster = topology_from_name("bigraph:2x4,devices=4,nic=own")
    assert len(cluster.nodes) == 2 * 2 * 4 // 4
    for node in cluster.nodes:
        plugged = [link.b for link in cluster.links for name in node.device_names() if link.a == name]
        assert plugged == ["upper0", "lower0", "upper1", "lower1"]


@pytest.mark.parametrize(
    ("sides", "links"),
    [
        ((1,), 0),
        ((2,), 1),
        ((3,), 3),
        ((8,), 8),
        ((1, 1), 0),
        ((2, 2), 4),
        ((2, 3), 9),
        ((4, 4), 32),
        ((3, 4, 5), 180),
        ((2, 2, 2), 12),
        ((1, 5), 5),
    ],
)
def test_torus(sides: tuple[int, ...], links: int) -> None:
    cluster = topology_from_name("torus:" + "x".join(map(str, sides)))
    assert len(cluster.nodes) == prod(sides)
    assert cluster.switches == ()
    assert all(node.forwards for node in cluster.nodes)
    assert len({frozenset((link.a, link.b)) for link in cluster.links}) == len(cluster.links) == links
    # Two neighbours along each side, one along a side of two, none along a side of one.
    neighbours = Counter(end for link in cluster.links for end in (link.a, link.b))
    assert {neighbours[node.name] for node in cluster.nodes} == {sum(min(side - 1, 2) for side in sides)}


@pytest.mark.parametrize("nodes", [1, 2, 3, 9])
def test_ring_is_a_torus_of_one_side(nodes: int) -> None:
    circle, line = topology_from_name(f"ring:{nodes}"), topology_from_name(f"torus:{nodes}")
    assert (circle.nodes, circle.switches, circle.links) == (line.nodes, line.switches, line.links)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_torus_of_any_sides(sides: list[int]) -> None:
    cluster = torus(sides)
    per_side = [prod(sides) // side * (0 if side == 1 else 1 if side == 2 else side) for side in sides]
    assert len(cluster.links) == sum(per_side)


def test_defaults() -> None:
    assert {link.parallel for link in topology_from_name("bigraph:2x2").links} == {1}
    cluster = topology_from_name("star:2")
    assert cluster.name == "star:2"
    assert all(len(node.devices) == 1 and node.bus is None and not node.forwards for node in cluster.nodes)
    assert {(link.rate_bytes_per_s, link.latency_s) for link in cluster.links} == {(DEFAULT_RATE, DEFAULT_LATENCY_S)}
    assert DEFAULT_RATE == 100 * G


@pytest.mark.parametrize("head", ["star:4", "leaf_spine:2x2", "fat_tree:4", "bigraph:2x2", "ring:4", "torus:2x2"])
class TestSettings:
    def test_the_name_is_the_word(self, head: str) -> None:
        word = f"{head},rate=10Gbit,latency=2us"
        assert topology_from_name(word).name == word

    def test_rate_and_latency(self, head: str) -> None:
        cluster = topology_from_name(f"{head},rate=10Gbit,latency=2us")
        assert {link.rate_bytes_per_s for link in cluster.links} == {10 * G}
        assert {link.latency_s for link in cluster.links} == {2e-6}

    @pytest.mark.parametrize("devices", [2, 3])
    def test_devices_behind_a_shared_nic(self, head: str, devices: int) -> None:
        cluster = topology_from_name(f"{head},devices={devices}")
        assert {len(node.devices) for node in cluster.nodes} == {devices}
        assert {node.bus for node in cluster.nodes} == {Bus(PCIE_BYTES_PER_S)}
        assert len(cluster.links) == len(topology_from_name(head).links)

    def test_bus(self, head: str) -> None:
        assert {node.bus for node in topology_from_name(f"{head},bus=12GB").nodes} == {Bus(12e9)}
        assert {node.bus for node in topology_from_name(f"{head},devices=4,bus=96Gbit,fanout=2").nodes} == {
            Bus(12e9, fanout=2)
        }
        assert {node.bus for node in topology_from_name(f"{head},fanout=0").nodes} == {Bus(PCIE_BYTES_PER_S)}

    def test_every_order_of_settings(self, head: str) -> None:
        one, other = (
            topology_from_name(f"{head},latency=1ms,devices=2"),
            topology_from_name(f"{head},devices=2,latency=1ms"),
        )
        assert (one.nodes, one.links) == (other.nodes, other.links)


@pytest.mark.parametrize("head", ["star:4", "leaf_spine:2x4", "fat_tree:4", "bigraph:2x2"])
def test_devices_with_nics_of_their_own(head: str) -> None:
    cluster = topology_from_name(f"{head},devices=2,nic=own")
    own = [link for link in cluster.links if "/" in link.a]
    assert [link.a for link in own] == list(cluster.device_names)
    kinds = {cluster.kind_of[link.a] for link in cluster.links} | {cluster.kind_of[link.b] for link in cluster.links}
    assert kinds == {"device", "switch"}


def test_own_nics_take_ports() -> None:
    assert len(topology_from_name("fat_tree:4,devices=2,nic=own").nodes) == 4**3 // 4 // 2
    assert groups(topology_from_name("leaf_spine:2x4,devices=2,nic=own"))["spine"] == 8


@pytest.mark.parametrize(
    ("rate", "gbits"),
    [
        ("40Gbit", [40, 40, 40, 40, 40]),
        ("40Gbit+10Gbit", [40, 10, 40, 10, 40]),
        ("2*40Gbit+2*10Gbit", [40, 40, 10, 10, 40]),
        ("1*40Gbit+4*10Gbit", [40, 10, 10, 10, 10]),
        ("9*1Gbit+40Gbit", [1, 1, 1, 1, 1]),
    ],
)
def test_uneven_rates(rate: str, gbits: list[int]) -> None:
    assert [link.rate_bytes_per_s for link in topology_from_name(f"star:5,rate={rate}").links] == [
        gbit * G for gbit in gbits
    ]


def test_uneven_rates_with_own_nics_go_by_server() -> None:
    links = topology_from_name("star:2,rate=40Gbit+10Gbit,devices=2,nic=own").links
    assert [link.rate_bytes_per_s for link in links] == [40 * G, 40 * G, 10 * G, 10 * G]


def test_between_switches_the_fastest_nic_counts() -> None:
    cluster = topology_from_name("bigraph:2x2,rate=10Gbit+40Gbit")
    assert {link.rate_bytes_per_s for link in cables(cluster, "upper", "lower")} == {40 * G}


def test_the_functions_and_the_words_agree() -> None:
    server = Server(2, "own", (10 * G,), 2e-6, Bus(12e9))
    by_word = topology_from_name(
        "leaf_spine:2x3,devices=2,nic=own,rate=10Gbit,latency=2us,bus=12GB,oversubscription=2,spines=1"
    )
    by_call = leaf_spine(2, 3, server, oversubscription=2, spines=1)
    assert (by_call.nodes, by_call.switches, by_call.links) == (by_word.nodes, by_word.switches, by_word.links)


def test_the_functions_name_what_they_build() -> None:
    assert torus((2, 3)).name == "torus:2x3"
    assert ring(5).name == "ring:5"
    plain = leaf_spine(2, 4)
    assert plain.name == "leaf_spine:2x4"
    assert (plain.switches, plain.links) == (
        topology_from_name("leaf_spine:2x4").switches,
        topology_from_name("leaf_spine:2x4").links,
    )


def test_large_ones_are_possible() -> None:
    assert len(topology_from_name("star:4096").nodes) == 4096
    assert len(topology_from_name("fat_tree:24").nodes) == 24**3 // 4


SIZE = " is not a size; write "
EXAMPLES = {
    "star": "star:NODES with whole numbers, for example star:8",
    "ring": "ring:NODES with whole numbers, for example ring:8",
    "leaf_spine": "leaf_spine:LEAVESxNODES_PER_LEAF with whole numbers, for example leaf_spine:4x8",
    "fat_tree": "fat_tree:PORTS_PER_SWITCH with whole numbers, for example fat_tree:4",
    "bigraph": "bigraph:SWITCHES_PER_SIDExENDPOINTS_PER_SWITCH with whole numbers, for example bigraph:4x4",
    "torus": "torus:SIDExSIDE... with whole numbers, for example torus:4x4",
}
TOO_MANY_SIZES = {"star": "8x8", "ring": "8x8", "leaf_spine": "2x2x2", "fat_tree": "4x4", "bigraph": "2x2x2"}
TOO_FEW_SIZES = {"leaf_spine": "4", "bigraph": "4"}


def refused(word: str) -> str:
    with pytest.raises(UserError) as caught:
        topology_from_name(word)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_every_family_has_an_example_that_works() -> None:
    assert set(EXAMPLES) == set(FAMILIES)
    for said in EXAMPLES.values():
        assert topology_from_name(said.rpartition(" ")[2]).nodes


@pytest.mark.parametrize("family", list(EXAMPLES))
@pytest.mark.parametrize(
    "sizes", ["", "0", "x", "-1", "1.5", "1e3", "4x", "x4", "4x0", "0x4", "4*4", "²", "4xx4", " ", "4 x4"]
)
def test_sizes_that_are_none(family: str, sizes: str) -> None:
    assert refused(f"{family}:{sizes}") == f'"{family}:{sizes}"{SIZE}{EXAMPLES[family]}'


@pytest.mark.parametrize("family", list(EXAMPLES))
def test_no_size_at_all(family: str) -> None:
    assert refused(family).endswith(f"{SIZE}{EXAMPLES[family]}")


@pytest.mark.parametrize(("family", "sizes"), [*TOO_MANY_SIZES.items(), *TOO_FEW_SIZES.items()])
def test_the_wrong_number_of_sizes(family: str, sizes: str) -> None:
    assert refused(f"{family}:{sizes}") == f'"{family}:{sizes}"{SIZE}{EXAMPLES[family]}'


@pytest.mark.parametrize(
    ("word", "said"),
    [
        (
            "",
            '"" is neither a file nor a family of clusters; known are bigraph, fat_tree, leaf_spine, ring, star, torus',
        ),
        ("stra:8", 'family of clusters; did you mean "star"? (write for example star:8'),
        ("Star:8", 'family of clusters; did you mean "star"? '),
        ("fat-tree:4", 'did you mean "fat_tree"?'),
        ("leafspine:4x8", 'did you mean "leaf_spine"?'),
        ("8", "is neither a file nor a family"),
        (":8", "is neither a file nor a family"),
        (",", "is neither a file nor a family"),
        ("star 8", "is neither a file nor a family"),
        ("fat_tree:3", "fat_tree needs an even number of ports per switch, got 3; use fat_tree:4"),
        ("fat_tree:1", "fat_tree needs an even number of ports per switch, got 1; use fat_tree:2"),
        (
            "leaf_spine:4x8,oversubscripton=2",
            'unknown setting "oversubscripton" of a family; did you mean "oversubscription"?',
        ),
        (
            "star:4,oversubscription=2",
            'unknown setting "oversubscription" of a family; known are bus, devices, fanout, ',
        ),
        ("star:4,parallel=2", 'unknown setting "parallel" of a family'),
        ("star:4,Rate=1Gbit", 'unknown setting "Rate" of a family; did you mean "rate"?'),
        ("star:4, rate=1Gbit", 'unknown setting " rate" of a family; did you mean "rate"?'),
        ("star:4,", 'unknown setting "" of a family; known are '),
        ("star:4,=", 'unknown setting "" of a family; known are '),
        ("star:4,rate", 'the setting "rate" has no value; write rate=...'),
        ("star:4,rate=", 'the setting "rate" has no value; write rate=...'),
        ("star:4,rate=1Gbit,rate=2Gbit", 'the setting "rate" is there twice; leave one out'),
        ("star:4,rate=-1Gbit", 'a rate must be above zero, got "-1Gbit"; write for example 25Gbit'),
        ("star:4,rate=0", '"0" is not a rate; write for example 25Gbit or 16GB (per second)'),
        ("star:4,rate=0Gbit", 'a rate must be above zero, got "0Gbit"; '),
        ("star:4,rate=nan", '"nan" is not a rate; '),
        ("star:4,rate=1e400bit", '"1e400bit" is not a finite number; write a smaller one'),
        ("star:4,rate=1Gbit=2", '"1Gbit=2" is not a rate; '),
        ("star:4,rate=1Gbit+", '"" is not a rate; '),
        ("star:4,rate=2*", '"" is not a rate; '),
        (
            "star:4,rate=0*1Gbit",
            f"rate=0 is not a whole number from 1 to {MOST_PARTS}; write for example rate=2*40Gbit",
        ),
        (
            "star:4,rate=x*1Gbit",
            f"rate=x is not a whole number from 1 to {MOST_PARTS}; write for example rate=2*40Gbit",
        ),
        ("star:4,rate=*1Gbit", f"rate= is not a whole number from 1 to {MOST_PARTS}; write for example rate=2*40Gbit"),
        ("star:4,rate=1.5*1Gbit", f"rate=1.5 is not a whole number from 1 to {MOST_PARTS}; "),
        ("star:4,rate=2*2*1Gbit", f"rate=2*2 is not a whole number from 1 to {MOST_PARTS}; "),
        ("star:4,rate=999999999*1Gbit", f"rate=999999999 is not a whole number from 1 to {MOST_PARTS}; "),
        ("star:4,latency=3", '"3" is not a time; write for example 3us, 1.5ms or 2s'),
        ("star:4,latency=-3us", 'a time must not be negative, got "-3us"; write for example 3us'),
        ("star:4,nic=both", "nic=both is not known; known are own, shared"),
        ("star:4,nic=Own", 'nic=Own is not known; did you mean "own"?'),
        ("star:4,devices=0", f"devices=0 is not a whole number from 1 to {MOST_PARTS}; write for example devices=2"),
        ("star:4,devices=-2", f"devices=-2 is not a whole number from 1 to {MOST_PARTS}; "),
        ("star:4,devices=1.5", f"devices=1.5 is not a whole number from 1 to {MOST_PARTS}; "),
        ("star:4,devices=nan", f"devices=nan is not a whole number from 1 to {MOST_PARTS}; "),
        ("star:4,devices=inf", f"devices=inf is not a whole number from 1 to {MOST_PARTS}; "),
        ("star:4,devices=two", f"devices=two is not a whole number from 1 to {MOST_PARTS}; "),
        ("star:4,fanout=-1", f"fanout=-1 is not a whole number from 0 to {MOST_PARTS}; write for example fanout=2"),
        ("star:4,bus=0GB", 'a rate must be above zero, got "0GB"; '),
        ("star:4,bus=fast", '"fast" is not a rate; '),
        (
            "leaf_spine:2x2,spines=0",
            f"spines=0 is not a whole number from 1 to {MOST_PARTS}; write for example spines=2",
        ),
        ("leaf_spine:2x2,spines=1.5", f"spines=1.5 is not a whole number from 1 to {MOST_PARTS}; "),
        ("leaf_spine:2x2,oversubscription=0", f"oversubscription=0 is not a number from 1 to {MOST_PARTS}; "),
        ("leaf_spine:2x2,oversubscription=0.5", f"oversubscription=0.5 is not a number from 1 to {MOST_PARTS}; "),
        ("leaf_spine:2x2,oversubscription=nan", f"oversubscription=nan is not a number from 1 to {MOST_PARTS}; "),
        (
            "bigraph:2x2,parallel=0",
            f"parallel=0 is not a whole number from 1 to {MOST_PARTS}; write for example parallel=2",
        ),
        ("ring:4,nic=own", "nodes of a ring or torus are cabled to one another as wholes; leave nic=own out"),
        ("torus:2x2,nic=own", "nodes of a ring or torus are cabled to one another as wholes; leave nic=own out"),
        ("ring:4,rate=40Gbit+10Gbit", "the cables of a ring or torus are all alike; write one rate, as in rate=40Gbit"),
    ],
)
def test_bad_words(word: str, said: str) -> None:
    assert said in refused(word)


@pytest.mark.parametrize(
    "word",
    [
        f"star:{MOST_PARTS + 1}",
        "star:99999999999",
        "star:" + "9" * 5000,
        f"ring:{MOST_PARTS + 1}",
        "torus:" + "x".join("2" * 30),
        "torus:99999x99999",
        "leaf_spine:99999x99999",
        "bigraph:99999x99999",
        f"fat_tree:{MOST_PARTS + 2}",
    ],
)
def test_sizes_that_are_too_large(word: str) -> None:
    assert refused(word).startswith(f"{word} is too large; use smaller numbers, for example ")


@pytest.mark.parametrize(
    "word",
    [
        "star:6000",
        "ring:6000",
        "torus:70x70",
        "leaf_spine:100x1,spines=9999",
        "fat_tree:9998",
        "bigraph:5000x1",
        "bigraph:2x2,parallel=9999",
        "star:11,devices=1000",
        "star:2,devices=10000",
        "star:1,devices=6000,nic=own",
    ],
)
def test_what_grows_too_large(word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused on the way, not when all of it is there; with a lower limit, since the real one takes seconds."""
    monkeypatch.setattr(topologies, "MOST_PARTS", 10_000)
    assert "more than 10000 devices, switches and cables in all; use smaller numbers" in refused(word)


def test_what_just_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topologies, "MOST_PARTS", 21)
    assert len(topology_from_name("star:10").nodes) == 10
    assert "more than 21 " in refused("star:11")


@pytest.mark.parametrize(
    "word", ["fat_tree:4,devices=3,nic=own", "fat_tree:8,devices=3,nic=own", "bigraph:3x3,devices=4,nic=own"]
)
def test_the_fix_for_ports_that_do_not_divide_works(word: str) -> None:
    said = refused(word)
    head, _, settings_ = word.partition(",")
    assert said.startswith(f"{head} has ")
    assert "NICs per server do not divide; use " in said
    assert said.endswith(", or nic=shared")
    fixed = said.rpartition("; use ")[2].partition(",")[0]
    assert topology_from_name(f"{fixed},{settings_}").nodes
    assert topology_from_name(word.replace("nic=own", "nic=shared")).nodes


def test_no_servers() -> None:
    with pytest.raises(UserError, match="has no device"):
        star(0)
    with pytest.raises(UserError, match="has no device"):
        star(2, Server(devices=0))


@settings(deadline=None, max_examples=300)
@given(st.text("staring:x0149=,*+ GMbitus.-e²", max_size=30).map(lambda tail: f"star:4{tail}") | st.text(max_size=20))
def test_any_word_gives_a_cluster_or_a_sentence(word: str) -> None:
    try:
        found: Cluster | str = topology_from_name(word)
    except UserError as error:
        found = str(error)
    assert found.name == word if isinstance(found, Cluster) else ";" in found
