"""Links: who talks when, real ranks over Gloo, shaped cables, and the cluster that comes out."""

import json
import os
import shutil
import socket
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mimatrix.cluster import Device, load_cluster
from mimatrix.lab import down, run, up
from mimatrix.profiler import Links, remarks, to_cluster
from mimatrix.profiler.links import circle, rounds

SCRIPT = Path(__file__).parent / "scripts" / "linked.py"
DEVICES = (Device("gpu", 1), Device("gpu", 2), Device("cpu", 3))


@given(st.integers(0, 20))
def test_everyone_meets_everyone_once(count: int) -> None:
    found = list(circle(count))
    assert sorted(pair for pairs in found for pair in pairs) == list(combinations(range(count), 2))
    assert len(found) <= max(0, count - 1 + count % 2)
    for pairs in found:
        assert len({player for pair in pairs for player in pair}) == 2 * len(pairs)


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12))
def test_hosts_do_not_share_their_nic_while_measuring(hosts: list[str]) -> None:
    inside, between = set(), []
    for pairs in rounds(hosts):
        assert len({rank for pair in pairs for rank in pair}) == 2 * len(pairs)
        abroad = [hosts[rank] for a, b in pairs for rank in (a, b) if hosts[a] != hosts[b]]
        assert len(abroad) == len(set(abroad))
        inside |= {pair for pair in pairs if hosts[pair[0]] == hosts[pair[1]]}
        between += [frozenset((hosts[a], hosts[b])) for a, b in pairs if hosts[a] != hosts[b]]
    assert inside == {(a, b) for a, b in combinations(range(len(hosts)), 2) if hosts[a] == hosts[b]}
    assert len(between) == len(set(between)) == len(list(combinations(set(hosts), 2)))


def started(hosts: str, **variables: str) -> list[subprocess.Popen[str]]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    size = len(hosts.split(","))
    told = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size), "HOSTS": hosts}
    pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return [
        subprocess.Popen(
            [sys.executable, str(SCRIPT)], env=os.environ | told | variables | {"RANK": str(rank)}, text=True, **pipes
        )
        for rank in range(size)
    ]


def test_ranks_as_processes_agree() -> None:
    ranks = started("a,a,b")
    try:
        said = [rank.communicate(timeout=100) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    found = [json.loads(out.splitlines()[-1]) for out, _ in said]
    assert found[0]["rate"] == found[1]["rate"] == found[2]["rate"]
    assert found[0]["latency"] == found[1]["latency"] == found[2]["latency"]
    for a in range(3):
        for b in range(3):
            assert (found[0]["rate"][a][b] > 1e6) == (a != b)
            assert (0 < found[0]["latency"][a][b] < 1) == (a != b)
    # The second rank of host a did not speak with b, the first one did.
    assert found[0]["rate"][1][2] == found[0]["rate"][0][2]


def test_a_rank_that_does_not_come_is_named() -> None:
    ranks = started("a,b", LATE="1")
    try:
        _, errors = ranks[0].communicate(timeout=60)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate(timeout=10)
    assert ranks[0].returncode != 0
    assert "PeerLost: rank 1 did not " in errors


@pytest.mark.skipif(
    os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")), reason="needs root, ip and tc"
)
def test_shaped_cables_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"links{os.getpid()}"
    monkeypatch.setenv("HOSTS", "n0,n1,n2")
    monkeypatch.setenv("ANSWERS", str(tmp_path))
    try:
        lab = up(load_cluster("star:3,rate=2*200Mbit+50Mbit"), name)
        run(lab, [sys.executable, str(SCRIPT)], timeout_s=80)
    finally:
        down(name)
    said = json.loads((tmp_path / "0.json").read_text())
    links = Links(said["latency"], said["rate"])
    assert links.rate_bytes_per_s[0][1] == pytest.approx(25e6, rel=0.25)
    assert links.rate_bytes_per_s[0][2] == pytest.approx(6.25e6, rel=0.25)
    cluster = to_cluster(links, ("n0", "n1", "n2"), DEVICES)
    assert [link.rate_bytes_per_s for link in cluster.links] == pytest.approx([25e6, 25e6, 6.25e6], rel=0.25)
    assert remarks(links, ("n0", "n1", "n2")) == ()


def links(rates: list[list[float]]) -> Links:
    return Links(
        tuple(tuple(1e-5 * (a != b) for b in range(len(rates))) for a in range(len(rates))), tuple(map(tuple, rates))
    )


def test_a_cluster_of_what_was_measured() -> None:
    rates = [[0, 9e9, 1e9], [9e9, 0, 1e9], [1e9, 1e9, 0]]
    cluster = to_cluster(links(rates), ("rack/a", "rack/a", "b"), DEVICES)
    assert [node.name for node in cluster.nodes] == ["rack-a", "b"]
    assert [node.devices for node in cluster.nodes] == [DEVICES[:2], DEVICES[2:]]
    assert cluster.nodes[0].bus is not None
    assert cluster.nodes[0].bus.rate_bytes_per_s == 9e9
    assert cluster.nodes[1].bus is None
    assert [(link.rate_bytes_per_s, link.latency_s) for link in cluster.links] == [(1e9, 5e-6)] * 2
    alone = to_cluster(links([[0, 5e9], [5e9, 0]]), ("a", "a"), DEVICES[:2])
    assert (len(alone.nodes), alone.links, alone.switches) == (1, (), ())


def test_a_pair_that_is_slower_than_its_ends_is_remarked() -> None:
    rates = [[0, 1e9, 1e9], [1e9, 0, 2e8], [1e9, 9e8, 0]]
    (said,) = remarks(links(rates), ("a", "b", "c"))
    assert said.startswith("b to c has 1.6Gbit, although both reach 8Gbit")
