"""Which profile speaks for which device, and what is added where."""

import pytest

from mimatrix.cluster import Cluster, load_cluster, read_cluster, write_cluster
from mimatrix.cluster.model import Device, Link, Node, Switch
from mimatrix.core.errors import UserError
from mimatrix.planner.communication import MeasuredCommunication
from mimatrix.planner.device_matching import assign_profiles, find_measured, list_devices, memory_for_room
from mimatrix.planner.model.curve import Curve
from mimatrix.planner.model.profile import Communication, Profile
from mimatrix.planner.what_if import Addition, add_node

CARDS = ("NVIDIA A40", "NVIDIA RTX A4000", "NVIDIA GeForce RTX 3090", "NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-80GB")


def profile(device: str, seconds: float = 1.0) -> Profile:
    return Profile(device, "m", Curve.of([(1, seconds)]), Curve.of([(1, 10)]), 1000, 0.0)


@pytest.mark.parametrize(
    ("kind", "card"),
    [
        ("A40", "NVIDIA A40"),
        ("a4000", "NVIDIA RTX A4000"),
        ("3090", "NVIDIA GeForce RTX 3090"),
        ("rtx 3090", "NVIDIA GeForce RTX 3090"),
        ("A100-SXM4-80GB", "NVIDIA A100-SXM4-80GB"),
        ("80GB", "NVIDIA A100-SXM4-80GB"),
        ("my NVIDIA A40", "NVIDIA A40"),
        ("309", "NVIDIA GeForce RTX 3090"),
    ],
)
def test_kinds(kind: str, card: str) -> None:
    assert find_measured(kind, CARDS) == card


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("A100", 'could be "NVIDIA A100-SXM4-40GB" or "NVIDIA A100-SXM4-80GB"; write which'),
        ("gpu", "was not measured"),
        ("", "was not measured"),
        ("RTX 3080", 'did you mean "RTX 3090"'),
        ("TPU v4", "measure it: mimatrix profile script.py"),
    ],
)
def test_kinds_that_are_not_known(kind: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        find_measured(kind, CARDS)
    assert said in str(caught.value)


def test_ranks_of_one_kind_are_like_the_measured_ones_in_turn() -> None:
    measured = [profile("cpu", 1.0), profile("cpu", 2.0), profile("A40", 0.1)]
    found = assign_profiles([Device("cpu"), Device("A40"), Device("cpu"), Device("cpu")], measured)
    assert [each.seconds.at(1) for each in found] == [1.0, 0.1, 2.0, 1.0]


def test_memory_of_the_description_counts() -> None:
    small, as_measured = assign_profiles([Device("cpu", 500), Device("cpu")], [profile("cpu")])
    assert (small.room_bytes, as_measured.room_bytes) == (460, 1000)


@pytest.mark.parametrize("room", [1, 22, 23, 24, 92, 99, 4710198083, 2**40 + 1, 10**15 + 7])
def test_a_room_that_is_described_as_memory_comes_back(room: int) -> None:
    text = write_cluster(Cluster("x", (Node("n", (Device("cpu", memory_for_room(room)),)),), (), ()))
    (found,) = assign_profiles(list_devices(read_cluster(text)), [profile("cpu")])
    assert found.room_bytes == room


@pytest.mark.parametrize(
    ("text", "kind", "count"), [("RTX 3090:2", "RTX 3090", 2), ("A40", "A40", 1), (" x : 3 ", "x", 3)]
)
def test_additions(text: str, kind: str, count: int) -> None:
    assert Addition.parse(text) == Addition(kind, count)


@pytest.mark.parametrize("text", ["", ":2", "x:0", "x:-1", "x:many", "x:2:3", "x:99999"])
def test_bad_additions(text: str) -> None:
    with pytest.raises(UserError, match="write a kind and a number"):
        Addition.parse(text)


def test_a_node_is_added_twice_where_the_others_are() -> None:
    cluster = load_cluster("examples/lab.toml")
    grown, said = add_node(cluster, Addition("RTX 3090", 2))
    again, _ = add_node(grown, Addition("H200", 1))
    assert said == "2 x RTX 3090 added as node added on switch desk, with one NIC of 10Gbit"
    assert again.device_names[-3:] == ("added/0", "added/1", "added1/0")
    # A kind that is there already has its memory.
    assert again.nodes[-2].devices[0] == Device("3090", 24 * 10**9)
    assert again.nodes[-1].devices[0] == Device("H200")


def test_nothing_is_added_where_there_is_no_switch() -> None:
    with pytest.raises(UserError, match="describe the larger cluster in a file"):
        add_node(load_cluster("ring:4"), Addition("x", 1))


def test_more_ranks_pay_more_than_the_measured_ones() -> None:
    network = MeasuredCommunication(Communication.of(0.4, 0.2, 0.2, "measured"), 2)
    assert network.cost((0, 1)).once_s[0] == 0.4
    assert network.cost((0, 1, 2, 3)).once_s[0] == pytest.approx(0.6)
    assert network.cost((1,)).once_s == (0.0,) * 4
    assert "as 2 ranks paid, for 4 times 1.50" in network.cost((0, 1, 2, 3)).reason


def test_what_one_rank_paid_says_nothing_about_more() -> None:
    network = MeasuredCommunication(Communication((0.0,) * 4, reason="nothing moves: one rank"), 1)
    assert network.cost((0, 1, 2)).is_free
    assert network.cost((0, 1, 2)).reason == "not measured: one rank alone"
    apart = MeasuredCommunication(Communication((0.0,) * 4, reason="not measured: one card at a time"), 3)
    assert apart.cost((0, 1, 2, 3)).reason == "not measured: one card at a time"


def test_an_added_a4000_does_not_get_the_memory_of_an_a40() -> None:
    link = Link("n0", "hub", 1e9, 1e-5)
    cluster = Cluster("c", (Node("n0", (Device("A40", 48 * 10**9),)),), (Switch("hub"),), (link,))
    grown, _ = add_node(cluster, Addition("A4000", 1))
    assert grown.nodes[-1].devices == (Device("A4000"),)
