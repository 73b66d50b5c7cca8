"""Real labs on this machine: rates, counters, ranks, and nothing left behind. Skipped where they cannot be made."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from mimatrix.cluster import load_cluster
from mimatrix.core.errors import UserError
from mimatrix.lab import Lab, down, link_bytes, namespace, recall, run, up
from mimatrix.lab.state import FOLDER
from mimatrix.lab.system import namespaces
from mimatrix.processes.cgroups import cpu_cgroups

ROOT = Path(__file__).resolve().parents[2]
# Two runs of the tests on one machine must not meet.
NAME = f"test{os.getpid()}"


def _missing() -> str:
    if not (shutil.which("ip") and shutil.which("tc")):
        return "needs ip and tc"
    if os.geteuid() != 0:
        return "needs root"
    made = subprocess.run(["ip", "netns", "add", f"mmx-{NAME}-try"], capture_output=True, text=True, timeout=10)
    subprocess.run(["ip", "netns", "delete", f"mmx-{NAME}-try"], capture_output=True, timeout=10)
    return made.stderr.strip() and f"needs network namespaces: {made.stderr.strip()}"


MISSING = _missing()
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING or "everything is there")


def mimatrix(*words: str, timeout: float = 60) -> subprocess.CompletedProcess[str]:
    verb, *rest = words
    command = [sys.executable, "-m", "mimatrix.cli.main", "lab", verb, "--name", NAME, *rest]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)


def remains() -> list[str]:
    """Everything of our lab that is still on this machine."""
    groups = cpu_cgroups()
    found = namespaces(f"mmx-{NAME}-") + [str(path) for path in FOLDER.glob(f"*{NAME}*")]
    return found + [str(path) for path in groups.find(f"mmx-{NAME}-")] if groups else found


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    down(NAME)
    assert remains() == []


SINK = """
import socket, sys, time
server = socket.create_server((sys.argv[1], 7000))
print("ready", flush=True)
peer, _ = server.accept()
heard = began = 0
while data := peer.recv(1 << 20):
    began = began or time.monotonic()
    heard += len(data)
print(heard, time.monotonic() - began, flush=True)
"""
SOURCE = """
import socket, sys
with socket.create_connection((sys.argv[1], 7000), timeout=20) as peer:
    peer.sendall(bytes(int(sys.argv[2])))
"""


def transfer(lab: Lab, source: int, target: int, count: int) -> float:
    """Bytes per second of one stream between two ranks."""
    seats = lab.layout.seats
    address = seats[target].address
    inside = [
        ["ip", "netns", "exec", namespace(lab.name, seats[rank].node), sys.executable] for rank in (target, source)
    ]
    with subprocess.Popen([*inside[0], "-c", SINK, address], stdout=subprocess.PIPE, text=True) as sink:
        assert sink.stdout is not None
        assert sink.stdout.readline() == "ready\n"
        subprocess.run([*inside[1], "-c", SOURCE, address, str(count)], check=True, timeout=30)
        heard, seconds = sink.stdout.readline().split()
    assert int(heard) == count
    return count / float(seconds)


def test_links_have_their_rates_and_count_their_bytes() -> None:
    lab = up(load_cluster("star:3,rate=2*200Mbit+50Mbit"), NAME)
    before = link_bytes(lab)
    assert set(before) == {f"{a}->{b}" for n in ("n0", "n1", "n2") for a, b in ((n, "hub"), ("hub", n))}
    quick, slow = 20_000_000, 5_000_000
    assert transfer(lab, 0, 1, quick) == pytest.approx(200e6 / 8, rel=0.15)
    after = link_bytes(lab)
    assert transfer(lab, 0, 2, slow) == pytest.approx(50e6 / 8, rel=0.15)
    last = link_bytes(lab)
    assert after["n0->hub"] - before["n0->hub"] == pytest.approx(quick, rel=0.03)
    assert last["hub->n1"] - before["hub->n1"] == pytest.approx(quick, rel=0.03)
    # What the slow port had no room for came a second time over the quick one.
    assert last["hub->n2"] - before["hub->n2"] == pytest.approx(slow, rel=0.03)
    # Only acknowledgements go back.
    assert last["hub->n0"] - before["hub->n0"] < 0.03 * quick


ALL_PAIRS = """
import json, os, socket, subprocess, sys, threading
rank = int(os.environ["RANK"])
with open(sys.argv[1]) as file:
    addresses = json.load(file)
server = socket.create_server((os.environ["MIMATRIX_ADDRESS"], 7000 + rank), backlog=64)

def answer():
    for _ in addresses:
        peer, (host, _) = server.accept()
        peer.sendall(host.encode())
        peer.close()

answering = threading.Thread(target=answer)
answering.start()
for other, address in enumerate(addresses):
    while True:
        try:
            peer = socket.create_connection((address, 7000 + other), timeout=5)
            break
        except ConnectionRefusedError:
            pass
    with peer:
        print(other, "sees", peer.makefile().read())
answering.join()
"""


@pytest.mark.parametrize("word", ["bigraph:2x2,rate=1Gbit", "leaf_spine:2x2,rate=1Gbit"])
def test_everyone_reaches_everyone(word: str, tmp_path: Path) -> None:
    lab = up(load_cluster(word), NAME)
    addresses = [seat.address for seat in lab.layout.seats]
    (tmp_path / "addresses.json").write_text(json.dumps(addresses))
    script = [sys.executable, "-c", ALL_PAIRS, str(tmp_path / "addresses.json")]
    done = mimatrix("run", "--timeout", "30s", "--", *script)
    assert done.returncode == 0, done.stderr
    expected = {
        f"[{seat.rank} {seat.node}] {other} sees {seat.address}"
        for seat in lab.layout.seats
        for other in range(len(addresses))
    }
    assert set(done.stdout.splitlines()) == expected


@pytest.mark.long
def test_packets_take_the_path_of_the_layout() -> None:
    lab = up(load_cluster("leaf_spine:2x2,rate=1Gbit"), NAME)
    for source, target in ((0, 2), (1, 3), (3, 0)):
        before = link_bytes(lab)
        transfer(lab, source, target, 1_000_000)
        sent = {name: count - before[name] for name, count in link_bytes(lab).items()}
        assert {name for name, count in sent.items() if count > 900_000} == set(lab.layout.path(source, target))


def test_ranks_are_told_where_they_are() -> None:
    lab = up(load_cluster("star:2,rate=1Gbit,devices=2"), NAME)
    done = mimatrix("run", "--", "env")
    assert done.returncode == 0, done.stderr
    lines = [line.partition("] ") for line in done.stdout.splitlines()]
    told = {
        label: dict(text.split("=", 1) for at, _, text in lines if at == label and "=" in text) for label, _, _ in lines
    }
    assert sorted(told) == ["[0 n0", "[1 n0", "[2 n1", "[3 n1"]
    third = told["[3 n1"]
    expected = {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "MASTER_ADDR": lab.layout.seats[0].address,
        "MASTER_PORT": told["[0 n0"]["MASTER_PORT"],
        "GLOO_SOCKET_IFNAME": "eth0",
        "UCX_NET_DEVICES": "eth0",
        "UCX_TLS": os.environ.get("UCX_TLS", "tcp"),
        "MIMATRIX_HOST": "n1",
        "MIMATRIX_ADDRESS": lab.layout.seats[3].address,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
    }
    assert {key: third[key] for key in expected} == expected
    assert load_cluster(third["MIMATRIX_CLUSTER"]) == lab.cluster


def test_quotas_slow_a_node_down() -> None:
    if not cpu_cgroups():
        pytest.skip("needs control groups for processors")
    assert mimatrix("up", "star:2,rate=1Gbit", "--cpus", "1,0.2").returncode == 0
    spin = "import time\nend = time.monotonic() + 1\nwhile time.monotonic() < end: pass\nprint(time.process_time())"
    done = mimatrix("run", "--", sys.executable, "-S", "-c", spin)
    used = {line.split()[0]: float(line.split()[-1]) for line in done.stdout.splitlines()}
    assert used["[1"] < 0.4


def test_status_says_what_went_where() -> None:
    made = mimatrix("up", "star:2,rate=1Gbit")
    assert made.returncode == 0, made.stderr
    assert "2 ranks on 2 nodes" in made.stdout
    transfer(recall(NAME), 0, 1, 1_000_000)
    found = json.loads(mimatrix("status", "--json").stdout)
    assert [rank["address"] for rank in found["ranks"]] == ["10.0.0.2", "10.0.0.4"]
    assert {c["name"]: c["bytes"] > 1_000_000 for c in found["channels"]} == {
        "n0->hub": True,
        "hub->n0": False,
        "n1->hub": False,
        "hub->n1": True,
    }
    shown = mimatrix("status").stdout
    assert "10.0.0.4" in shown
    assert "1Gbit" in shown


def test_exit_codes_and_sentences() -> None:
    nothing = mimatrix("down")
    assert (nothing.returncode, nothing.stdout) == (0, f'no lab "{NAME}" is up; nothing was removed\n')
    assert refused("run", "--", "true").startswith(f'mimatrix: no lab "{NAME}" is up; start one with')
    lab = up(load_cluster("star:2,rate=1Gbit"), NAME)
    again = f'the lab "{NAME}" is up already; run `mimatrix lab down --name {NAME}` first'
    assert refused("up", "star:2") == f"mimatrix: {again}"
    with pytest.raises(UserError, match="there is no command"):
        run(lab, ["no_such_command"])
    failed = mimatrix("run", "--grace", "0s", "--", "sh", "-c", "[ $RANK = 0 ] || exit 5; sleep 30")
    assert failed.returncode == 5
    assert failed.stderr == "mimatrix: [1 n1] ended with exit code 5\n"


def refused(*words: str) -> str:
    done = mimatrix(*words)
    assert done.returncode == 2, done
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    return line


def test_what_fails_midway_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mimatrix.lab.ip_commands._SETTINGS", "exit 3\n")
    with pytest.raises(UserError, match="failed"):
        up(load_cluster("star:2"), NAME)
    assert remains() == []


@pytest.mark.parametrize("when", ["claimed", "namespaces", "cables", "half"])
def test_a_lab_that_was_killed_on_the_way_up_goes_down(when: str) -> None:
    script = f"""
import os, signal
from mimatrix.cluster import load_cluster
from mimatrix.lab import lifecycle, state
orders = []
def counted(words, text=""):
    if len(orders) == {["claimed", "namespaces", "cables", "half"].index(when)}:
        os.kill(os.getpid(), signal.SIGKILL)
    orders.append(words)
    return order(words, text)
order, lifecycle.run_tool = lifecycle.run_tool, counted
lifecycle.up(load_cluster("star:3"), "{NAME}", (1.0, 1.0, 1.0))
"""
    killed = subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=30)
    assert killed.returncode == -signal.SIGKILL
    assert remains()
    for attempt in (partial(recall, NAME), partial(up, load_cluster("star:2"), NAME)):
        with pytest.raises(UserError, match=f"run `mimatrix lab down --name {NAME}`"):
            attempt()
    down(NAME)
    assert remains() == []


@pytest.mark.parametrize("delay_s", [0.45, 0.5, 0.55, 0.65])
def test_killed_at_any_moment(delay_s: float) -> None:
    words = [sys.executable, "-m", "mimatrix.cli.main", "lab", "up", "fat_tree:4", "--name", NAME]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        time.sleep(delay_s)
        process.kill()
    down(NAME)
    assert remains() == []


def test_down_needs_no_memory_and_ends_what_runs() -> None:
    quotas = (1.0, 1.0) if cpu_cgroups() else ()
    up(load_cluster("star:2,rate=1Gbit"), NAME, quotas)
    (FOLDER / f"{NAME}.json").unlink()
    inside = ["ip", "netns", "exec", namespace(NAME, "n0"), "sh", "-c", "trap '' TERM; while :; do sleep 0.1; done"]
    with subprocess.Popen(inside) as deaf:
        time.sleep(0.3)
        with pytest.raises(UserError, match="remains"):
            up(load_cluster("star:2"), NAME)
        removed = down(NAME)
        assert deaf.wait(timeout=10) == -signal.SIGKILL
    assert removed.namespaces == 3
    assert removed.processes >= 1
    assert remains() == []


def test_a_lab_with_a_part_gone_is_not_up() -> None:
    up(load_cluster("star:2"), NAME)
    subprocess.run(["ip", "netns", "delete", namespace(NAME, "n1")], check=True, timeout=10)
    with pytest.raises(UserError, match="parts of the lab"):
        recall(NAME)


def test_two_labs_do_not_meet() -> None:
    other = f"{NAME}b"
    try:
        up(load_cluster("star:2"), NAME)
        up(load_cluster("star:2"), other)
        down(NAME)
        assert len(namespaces(f"mmx-{other}-")) == 3
    finally:
        down(other)


def test_not_root_gets_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(UserError, match="needs root; run it with sudo"):
        up(load_cluster("star:2"), NAME)
    monkeypatch.undo()
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "/nowhere")
        with pytest.raises(UserError, match="needs ip and tc and sh, not found here"):
            up(load_cluster("star:2"), NAME)
