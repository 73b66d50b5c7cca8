"""The network reaches every rank by itself: from rank 0's file, or from what an earlier job measured."""

from pathlib import Path

import pytest
from support.ranks import in_groups

from mimatrix.cluster import Cluster, topology_from_name, write_cluster
from mimatrix.collectives import Collective
from mimatrix.comm import Group
from mimatrix.comm.tuning.choice import AlgorithmChoice
from mimatrix.comm.tuning.known_cluster import remember_cluster
from mimatrix.core.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
UNEVEN = topology_from_name("star:3,rate=2*400Mbit+100Mbit")
HOSTS = ["a", "b", "c"]


@pytest.fixture(autouse=True)
def nothing_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIMATRIX_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("MIMATRIX_CLUSTER", raising=False)


def origins(hosts: list[str]) -> list[str]:
    """Return what each rank of a job knows its cluster from."""

    def on_rank(group: Group) -> str:
        return group.forecast.known.origin if group.forecast else ""

    return in_groups(len(hosts), on_rank, hosts=hosts, with_gloo=True)


def remember(hosts: list[str], cluster: Cluster) -> None:
    in_groups(len(hosts), lambda group: remember_cluster(group.endpoint, cluster), hosts=hosts)


def test_nothing_is_known_at_first() -> None:
    assert origins(HOSTS) == [""] * 3


def test_described_cluster_reaches_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "lab.toml"
    file.write_text(write_cluster(UNEVEN))
    monkeypatch.setenv("MIMATRIX_CLUSTER", str(file))
    assert origins(HOSTS) == [str(file)] * 3
    assert origins(["a", "b"]) == ["", ""], "it has another number of devices"


def test_bad_description_is_refused_on_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "lab.toml"
    file.write_text("[[node]]\nname = 3\n")
    monkeypatch.setenv("MIMATRIX_CLUSTER", str(file))
    with pytest.raises(UserError, match=r"lab\.toml"):
        origins(HOSTS)


def test_measured_cluster_is_known_to_the_next_job_on_the_same_hosts() -> None:
    remember(HOSTS, UNEVEN)
    assert origins(HOSTS) == ["measured by an earlier job"] * 3
    assert origins(["a", "a", "b"]) == [""] * 3, "ranks are elsewhere"


def test_measured_cluster_adds_shares_by_bandwidth_without_a_variable() -> None:
    remember(HOSTS, UNEVEN)

    def on_rank(group: Group) -> set[str]:
        assert group.forecast
        segmented = AlgorithmChoice("send_recv", "gdraa", 16)
        by_bandwidth = group.forecast.by_bandwidth(segmented)
        assert by_bandwidth
        assert group.forecast.seconds(by_bandwidth, Collective.ALL_REDUCE, 1 << 24) < group.forecast.seconds(
            segmented, Collective.ALL_REDUCE, 1 << 24
        )
        return {str(by_bandwidth)}

    assert in_groups(3, on_rank, hosts=HOSTS, with_gloo=True) == [{"send_recv gdraa/16 by bandwidth"}] * 3


@pytest.mark.parametrize("hosts", [["a", "b", "a"], ["a", "a", "a"]])
def test_ranks_that_are_not_host_by_host_or_on_one_host_remember_nothing(hosts: list[str]) -> None:
    remember(hosts, UNEVEN)
    assert origins(hosts) == [""] * 3


def test_damaged_file_of_an_earlier_job_is_as_good_as_none(tmp_path: Path) -> None:
    remember(HOSTS, UNEVEN)
    (file,) = (tmp_path / "cache").rglob("*.toml")
    file.write_text("[[node")
    assert origins(HOSTS) == [""] * 3
