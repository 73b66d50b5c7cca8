"""Clusters out to a file and in again, and each mistake in a file told with the line it stands on."""

import tomllib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimatrix.cluster import (
    Bus,
    Cluster,
    Device,
    Link,
    Node,
    Switch,
    load_cluster,
    read_cluster,
    topology_from_name,
    write_cluster,
)
from mimatrix.cluster.model import MOST_PARTS
from mimatrix.core.errors import ConfigError, UserError

GOOD = """\
# Two unlike machines and a switch.
name = "lab"

[[switch]]
name = "hub"
group = "leaf"

[[node]]
name = "big"
devices = [
  { kind = "A100", memory = "80GB", count = 2 },
  { kind = "A40" },
]
bus = { rate = "16GB", latency = "1us", fanout = 2 }

[[node]]
name = "small"
count = 2
devices = [{ memory = "8GiB" }]
forwards = true

[[link]]
between = ["big", "hub"]
rate = "100Gbit"
latency = "2us"

[[link]]
between = ["small0", "hub"]
rate = "10Gbit"
parallel = 2

[[link]]
between = ["small1", "small0"]
rate = "1250MB"
"""


def test_what_is_written_is_meant() -> None:
    a100, small = Device("A100", 80 * 10**9), (Device("gpu", 8 << 30),)
    assert read_cluster(GOOD) == Cluster(
        "lab",
        (
            Node("big", (a100, a100, Device("A40")), Bus(16e9, 1e-6, 2)),
            Node("small0", small, forwards=True),
            Node("small1", small, forwards=True),
        ),
        (Switch("hub", "leaf"),),
        (
            Link("big", "hub", 100e9 / 8, 2e-6),
            Link("small0", "hub", 10e9 / 8, parallel=2),
            Link("small1", "small0", 10e9 / 8),
        ),
    )


def test_tables_of_their_own_read_like_inline_ones() -> None:
    text = (
        '[[node]]\nname = "a"\n[node.bus]\nrate = "1GB"\n[[node.devices]]\nkind = "A40"\n[[node.devices]]\ncount = 2\n'
    )
    devices = (Device("A40"), Device(), Device())
    assert read_cluster(text) == Cluster("cluster", (Node("a", devices, Bus(1e9)),), (), ())


NAMES = st.text(min_size=1, max_size=4).filter(lambda name: "/" not in name and "->" not in name)
RATES = (
    st.floats(1e-3, 1e15)
    | st.floats(min_value=1e-3, max_value=1e18)
    | st.integers(1, 10**15).map(float)
    | st.integers(1, 400).map(lambda gbit: gbit * 1e9 / 8)
    | st.integers(1, 4000).map(lambda mbit: mbit * 1e6 / 8)
    | st.sampled_from([1 / 3, 0.1, 1e9 / 7, 2.0**53 + 2, 1e-3, 1e18])
)
LATENCIES = (
    st.just(0.0)
    | st.floats(0, 1e3)
    | st.integers(0, 10**6).map(lambda nanos: nanos * 1e-9)
    | st.sampled_from([5e-324, 1e-300, 1 / 3, 1e-6, 1.5e-6, 0.1 + 0.2, 123456.789])
)
BUSES = st.none() | st.builds(Bus, RATES, LATENCIES, st.integers(0, 4))
DEVICES = st.builds(Device, st.sampled_from(["gpu", "A40", "", "é\n\"'\\"]), st.integers(0, 3) | st.integers(0, 2**53))


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    names = draw(st.lists(NAMES, min_size=1, max_size=7, unique=True))
    count = draw(st.integers(1, len(names)))
    devices = st.lists(DEVICES, min_size=1, max_size=4).map(tuple)
    drawn = [(name, draw(devices), draw(BUSES), draw(st.booleans())) for name in names[:count]]
    # Several devices of a node that forwards must have a bus.
    nodes = tuple(Node(name, some, bus, on and (len(some) == 1 or bus is not None)) for name, some, bus, on in drawn)
    switches = tuple(Switch(name, draw(st.sampled_from(["", "leaf", "a b"]))) for name in names[count:])
    known = [*names, *(name for node in nodes for name in node.device_names())]
    ends = st.lists(st.sampled_from(known), min_size=2, max_size=2, unique=True)
    link = st.builds(
        lambda pair, rate, latency, parallel: Link(pair[0], pair[1], rate, latency, parallel),
        ends,
        RATES,
        LATENCIES,
        st.integers(1, 3),
    )
    return Cluster(draw(st.text(max_size=5)), nodes, switches, tuple(draw(st.lists(link, max_size=5))))


@settings(deadline=None, max_examples=300)
@given(clusters())
def test_written_and_read(cluster: Cluster) -> None:
    assert read_cluster(write_cluster(cluster)) == cluster


@settings(deadline=None)
@given(clusters())
def test_written_twice_is_written_the_same(cluster: Cluster) -> None:
    text = write_cluster(cluster)
    assert write_cluster(read_cluster(text)) == text


@pytest.mark.parametrize(
    "word",
    [
        "star:3,rate=2*40Gbit+10Gbit,latency=1.5us",
        "leaf_spine:3x5,oversubscription=3",
        "fat_tree:4,devices=2,nic=own",
        "bigraph:2x3,parallel=2,devices=2,bus=12GB,fanout=1",
        "ring:3",
        "torus:2x3x2",
    ],
)
def test_families_written_and_read(word: str, tmp_path: Path) -> None:
    path = tmp_path / "some.toml"
    path.write_text(write_cluster(topology_from_name(word)), encoding="utf-8")
    assert load_cluster(str(path)) == topology_from_name(word)


def test_a_person_can_read_what_is_written() -> None:
    nodes = (Node("a", (Device(),) * 3 + (Device("A40", 48 * 10**9),), Bus(16e9, 0.0, 2), True),)
    links = (Link("a", "s", 25e9 / 8, 1.5e-6, 2), Link("a/0", "s", 100e6 / 8), Link("a/1", "s", 1e9 / 3))
    written = tomllib.loads(write_cluster(Cluster("lab", nodes, (Switch("s"),), links)))
    assert written == {
        "name": "lab",
        "switch": [{"name": "s"}],
        "node": [
            {
                "name": "a",
                "devices": [{"kind": "gpu", "count": 3}, {"kind": "A40", "memory": "48000000000B"}],
                "bus": {"rate": "128Gbit", "fanout": 2},
                "forwards": True,
            }
        ],
        "link": [
            {"between": ["a", "s"], "rate": "25Gbit", "latency": "1.5us", "parallel": 2},
            {"between": ["a/0", "s"], "rate": "100Mbit"},
            {"between": ["a/1", "s"], "rate": f"{1e9 / 3!r}B"},
        ],
    }


def test_numbers_of_numpy_are_written_as_numbers() -> None:
    rate, latency = np.float64(1e9 / 3), np.float64(1e-6 / 3)
    cluster = Cluster("lab", (Node("a", (Device(),)),), (Switch("s"),), (Link("a", "s", rate, latency),))
    assert read_cluster(write_cluster(cluster)) == cluster


def changed(before: str, after: str) -> str:
    assert GOOD.count(before) == 1, before
    return GOOD.replace(before, after)


def refused(text: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_cluster(text, "lab.toml")
    assert "\n" not in str(caught.value)
    return str(caught.value)


NODE1, NODE2 = " in [[node]] number 1", " in [[node]] number 2"
LINK1, LINK2, LINK3 = (f" in [[link]] number {number}" for number in (1, 2, 3))
MISTAKES = [
    # before, after, line, key, place, what is said
    ('name = "lab"', "name = 3", 2, "name", "", "wanted a text, got 3; "),
    ('name = "lab"', 'nam = "lab"', 2, "nam", "", 'unknown key; did you mean "name"?'),
    ("[[switch]]", "[[swich]]", 4, "swich", "", 'unknown key; did you mean "switch"?'),
    ("[[switch]]", "[switch]", 4, "switch", "", "wanted tables; write [[switch]] and its keys below"),
    ('name = "hub"', "", 4, "name", " in [[switch]] number 1", "missing; add a line name = ..."),
    ('group = "leaf"', "group = 1", 6, "group", " in [[switch]] number 1", "wanted a text, got 1; "),
    ('group = "leaf"', 'gruop = "leaf"', 6, "gruop", " in [[switch]] number 1", 'unknown key; did you mean "group"?'),
    ('name = "big"', "", 8, "name", NODE1, "missing; add a line name = ..."),
    ('name = "big"', 'nmae = "big"', 8, "name", NODE1, 'missing; add a line name = ... (is "nmae" misspelt?)'),
    ('"80GB"', '"80GX"', 11, "memory", NODE1, '"80GX" is not a size; write for example 64MiB, 80GB or 4096'),
    ('"80GB"', '"-80GB"', 11, "memory", NODE1, 'a size must not be negative, got "-80GB"; '),
    ('"80GB"', "80", 11, "memory", NODE1, "wanted a text, got 80; "),
    ("count = 2 }", "count = 0 }", 11, "count", NODE1, "wanted 1 or more, got 0; leave the key out for 1"),
    ("count = 2 }", "count = -3 }", 11, "count", NODE1, "wanted 1 or more, got -3; leave the key out for 1"),
    ("count = 2 }", "count = 2.5 }", 11, "count", NODE1, "wanted a whole number, got 2.5; write for example 4"),
    ("count = 2 }", "count = true }", 11, "count", NODE1, "wanted a whole number, got True; write for example 4"),
    (
        "count = 2 }",
        f"count = {MOST_PARTS + 1} }}",
        11,
        "count",
        NODE1,
        f"wanted {MOST_PARTS} at the most, got {MOST_PARTS + 1}; use a smaller",
    ),
    ('kind = "A40" }', 'knid = "A40" }', 12, "knid", NODE1, 'unknown key; did you mean "kind"?'),
    ('kind = "A40" }', "kind = 40 }", 12, "kind", NODE1, "wanted a text, got 40; "),
    ('{ kind = "A40" }', '"A40"', 10, "devices", NODE1, "wanted inline tables; write devices = [{ kind"),
    ('rate = "16GB"', 'rate = "0GB"', 14, "rate", NODE1, 'a rate must be above zero, got "0GB"; '),
    ('rate = "16GB", ', "", 14, "rate", NODE1, "missing; add a line rate = ..."),
    ('latency = "1us"', 'latency = "-1us"', 14, "latency", NODE1, 'a time must not be negative, got "-1us"; '),
    ("fanout = 2", "fanout = -2", 14, "fanout", NODE1, "wanted 0 or more, got -2; leave the key out for 0"),
    ("fanout = 2", "fan_out = 2", 14, "fan_out", NODE1, 'unknown key; did you mean "fanout"?'),
    ("count = 2\n", "count = 0\n", 18, "count", NODE2, "wanted 1 or more, got 0; leave the key out for 1"),
    ("count = 2\n", 'count = "2"\n', 18, "count", NODE2, "wanted a whole number, got '2'; "),
    (
        "count = 2\n",
        "count = 99999999999999\n",
        18,
        "count",
        NODE2,
        f"wanted {MOST_PARTS} at the most, got 99999999999999; ",
    ),
    ('[{ memory = "8GiB" }]', "[]", 19, "devices", NODE2, "wanted one or more; add one, or leave the node out"),
    ('[{ memory = "8GiB" }]', "[{ count = 0 }]", 19, "count", NODE2, "wanted 1 or more, got 0; "),
    ('[{ memory = "8GiB" }]', '{ memory = "8GiB" }', 19, "devices", NODE2, "wanted a list, got {"),
    ('devices = [{ memory = "8GiB" }]', "", 16, "devices", NODE2, "missing; add a line devices = ..."),
    ("forwards = true", 'forwards = "yes"', 20, "forwards", NODE2, "wanted true or false, got 'yes'; write true"),
    ('["big", "hub"]', '["big", "hbu"]', 23, "between", LINK1, 'there is no "hbu"; did you mean "hub"?'),
    ('["big", "hub"]', '["big"]', 23, "between", LINK1, "wanted two names; write between = ["),
    ('["big", "hub"]', '["big", "hub", "hub"]', 23, "between", LINK1, "wanted two names; write between = ["),
    ('["big", "hub"]', '["big", 3]', 23, "between", LINK1, "wanted two names; write between = ["),
    ('["big", "hub"]', '"big-hub"', 23, "between", LINK1, "wanted a list, got 'big-hub'; write [...]"),
    ('rate = "100Gbit"', "", 22, "rate", LINK1, "missing; add a line rate = ..."),
    ('latency = "2us"', 'latency = "2"', 25, "latency", LINK1, '"2" is not a time; write for example 3us'),
    ('["small0", "hub"]', '["small", "hub"]', 28, "between", LINK2, 'there is no "small"; did you mean "small1"?'),
    ("parallel = 2", "parallel = 0", 30, "parallel", LINK2, "wanted 1 or more, got 0; leave the key out for 1"),
    ("parallel = 2", "paralel = 2", 30, "paralel", LINK2, 'unknown key; did you mean "parallel"?'),
    (
        '["small1", "small0"]',
        '["small1/1", "hub"]',
        33,
        "between",
        LINK3,
        'there is no "small1/1"; did you mean "small1',
    ),
    ('"1250MB"', '"1250MX"', 34, "rate", LINK3, '"1250MX" is not a rate; '),
]


@pytest.mark.parametrize(("before", "after", "line", "key", "place", "said"), MISTAKES)
def test_mistakes(before: str, after: str, line: int, key: str, place: str, said: str) -> None:
    found = refused(changed(before, after))
    assert found.startswith(f'lab.toml line {line}, key "{key}"{place}: {said}')
    assert ";" in found


def test_the_largest_number_is_no_mistake() -> None:
    assert read_cluster(changed("fanout = 2", f"fanout = {MOST_PARTS}")).nodes[0].bus == Bus(16e9, 1e-6, MOST_PARTS)


MISTAKES_OF_THE_WHOLE = [
    ("", 'lab.toml: cluster "cluster" has no device; add a [[node]] with devices = [...]'),
    (changed('name = "big"', 'name = "hub"'), 'lab.toml: the name "hub" is used 2 times; '),
    (changed('name = "big"', 'name = "small0"'), 'lab.toml: the name "small0" is used 2 times; '),
    (changed('name = "big"', 'name = "big/0"'), 'lab.toml: "big/0" cannot be a name; '),
    (changed('name = "big"', 'name = ""'), 'lab.toml: "" cannot be a name; '),
    (changed('["big", "hub"]', '["hub", "hub"]'), "lab.toml: the link hub - hub joins a thing to itself; remove it"),
    (changed("count = 2\n", "count = 2000\n").replace("8GiB", '8GiB", count = 2000, kind = "x'), "lab.toml: cluster "),
    (changed('["big", "hub"]', '["big", "hub"'), "lab.toml is not TOML: "),
]


@pytest.mark.parametrize(("text", "said"), MISTAKES_OF_THE_WHOLE)
def test_mistakes_of_the_whole(text: str, said: str) -> None:
    assert refused(text).startswith(said)


@settings(deadline=None, max_examples=300)
@given(st.data())
def test_a_damaged_file_never_ends_in_a_traceback(data: st.DataObject) -> None:
    lines = GOOD.splitlines()
    at = data.draw(st.integers(0, len(lines) - 1))
    junk = data.draw(st.sampled_from(["", "[", "]]", "= 1", "count = -1", "[[node]]", '"', "devices = [{}]", "x" * 99]))
    text = "\n".join([*lines[:at], junk, *lines[at + data.draw(st.integers(0, 3)) :]])
    try:
        found: Cluster | ConfigError = read_cluster(text)
    except ConfigError as error:
        found = error
    assert isinstance(found, Cluster) or str(found).startswith("cluster.toml")


def test_counted_devices_stand_side_by_side() -> None:
    text = '[[node]]\nname = "a"\ndevices = [{ kind = "x", count = 2 }, { kind = "y" }, { kind = "x" }]\n'
    assert [device.kind for device in read_cluster(text).nodes[0].devices] == ["x", "x", "y", "x"]


@pytest.mark.parametrize(("count", "names"), [(1, ["a"]), (2, ["a0", "a1"]), (3, ["a0", "a1", "a2"])])
def test_counted_nodes_are_numbered(count: int, names: list[str]) -> None:
    text = f'[[node]]\nname = "a"\ndevices = [{{}}]\ncount = {count}\n'
    assert [node.name for node in read_cluster(text).nodes] == names


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r'there is no cluster file ".*lab\.toml"; give a TOML file or a family'
    ) as caught:
        load_cluster(str(tmp_path / "lab.toml"))
    assert "star:8" in str(caught.value)


def test_a_folder_is_no_file(tmp_path: Path) -> None:
    folder = tmp_path / "lab.toml"
    folder.mkdir()
    with pytest.raises(UserError, match=r"lab\.toml.*; give a TOML file"):
        load_cluster(str(folder))
    with pytest.raises(UserError, match="is neither a file nor a family of clusters"):
        load_cluster(str(tmp_path))


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    path = tmp_path / "lab.toml"
    path.write_bytes(b"name = '\xff\xfe'")
    with pytest.raises(UserError, match=r"lab\.toml.* cannot be read .*; give a TOML file in UTF-8"):
        load_cluster(str(path))


def test_a_file_with_a_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "lab.toml"
    path.write_text(GOOD, encoding="utf-8-sig")
    assert load_cluster(str(path)) == read_cluster(GOOD)


def test_a_file_needs_no_ending(tmp_path: Path) -> None:
    path = tmp_path / "lab"
    path.write_text(GOOD, encoding="utf-8")
    assert load_cluster(str(path)) == read_cluster(GOOD)


def test_errors_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "lab.toml"
    path.write_text(changed("parallel = 2", "parallel = 0"), encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        load_cluster(str(path))
    assert str(caught.value).startswith(f"{path} line 30, ")


def test_a_family_longer_than_the_name_of_a_file() -> None:
    cluster = load_cluster("star:64,rate=" + "+".join(f"{index}Gbit" for index in range(1, 65)))
    assert [link.rate_bytes_per_s for link in cluster.links] == [index * 1e9 / 8 for index in range(1, 65)]


@pytest.mark.parametrize("text", ["\x00", "a\x00.toml", "x" * 5000, "x" * 5000 + ".toml", "", ".", "/"])
def test_what_can_be_no_path(text: str) -> None:
    with pytest.raises(UserError, match=r"; (give a TOML file|did you mean|known are)"):
        load_cluster(text)
