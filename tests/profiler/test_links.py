"""Links: which pairs are measured when, real ranks over Gloo, shaped cables."""

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
from mimatrix.profiler import Links, slow_pair_warnings, to_cluster
from mimatrix.profiler.links import probe_rounds, round_robin

SCRIPT = Path(__file__).parent / "scripts" / "linked.py"
DEVICES = (Device("gpu", 1), Device("gpu", 2), Device("cpu", 3))


@given(st.integers(0, 20))
def test_round_robin_pairs_everyone_once(count: int) -> None:
    found = list(round_robin(count))
    assert sorted(pair for pairs in found for pair in pairs) == list(combinations(range(count), 2))
    assert len(found) <= max(0, count - 1 + count % 2)
    for pairs in found:
        assert len({player for pair in pairs for player in pair}) == 2 * len(pairs)


@given(st.lists(st.sampled_from("abcd"), min_size=1, max_size=12))
def test_one_rank_per_host_uses_the_nic_in_a_round(hosts: list[str]) -> None:
    inside, between = set(), []
    for pairs in probe_rounds(hosts):
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


def test_all_ranks_get_the_same_links() -> None:
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


@pytest.mark.long
def test_a_missing_rank_is_named() -> None:
    ranks = started("a,b", LATE="1")
    try:
        _, errors = ranks[0].communicate(timeout=60)
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate(timeout=10)
    assert ranks[0].returncode != 0
    assert "PeerLost: rank 1 did not " in errors


@pytest.mark.long
@pytest.mark.skipif(
    os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")), reason="needs root, ip and tc"
)
def test_shaped_cables_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert slow_pair_warnings(links, ("n0", "n1", "n2")) == ()
