"""The coordinator as a process: it outlives the rank that started it, and never its job."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from mimatrix.comm.control.client import ControlClient
from mimatrix.comm.control.coordinator_process import CoordinatorProcess, start_coordinator
from mimatrix.comm.control.job_store import JobStore
from mimatrix.core import environment
from mimatrix.core.errors import WorldError

TOKEN = "a secret of this test"
HOSTS = ["a", "b", "c"]
STARTER = f"""
import sys, time
from mimatrix.comm.control.client import ControlClient
from mimatrix.comm.control.coordinator_process import start_coordinator

process = start_coordinator("127.0.0.1", 0, {TOKEN!r}, 3)
control = ControlClient.connect(0, {HOSTS!r}, "127.0.0.1", process.port, 0, {TOKEN!r})
control.arrive("ready", 1, [0], None)
control.wait_arrivals("ready", 1, 20)
print(process.port, process.pid, flush=True)
time.sleep(60)
"""


def connect(port: int, rank: int) -> ControlClient:
    return ControlClient.connect(rank, HOSTS, "127.0.0.1", port, 0, TOKEN)


def meet(*clients: ControlClient) -> None:
    for client in clients:
        client.arrive("g", 1, [each.rank for each in clients], None)
    for client in clients:
        assert client.wait_arrivals("g", 1, 10) is not None


def has_ended(pid: int, within_s: float) -> bool:
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


@pytest.fixture
def process() -> Iterator[CoordinatorProcess]:
    started = start_coordinator("127.0.0.1", 0, TOKEN, 3)
    yield started
    with suppress(ProcessLookupError):
        os.kill(started.pid, signal.SIGKILL)


def test_coordinator_process_answers_soon_after_it_was_started() -> None:
    """The fastest of a few: other programs use this machine too."""
    times = []
    for _ in range(5):
        started = time.perf_counter()
        process = start_coordinator("127.0.0.1", 0, TOKEN, 1)
        client = connect(process.port, 0)
        JobStore(client).set("key", "value")
        times.append(time.perf_counter() - started)
        client.close()
    assert min(times) < 0.3, times


def test_coordinator_process_outlives_the_rank_that_started_it() -> None:
    with subprocess.Popen([sys.executable, "-c", STARTER], stdout=subprocess.PIPE, text=True) as starter:
        assert starter.stdout
        port, pid = map(int, starter.stdout.readline().split())
        others = [connect(port, rank) for rank in (1, 2)]
        meet(*others)
        starter.kill()
        for client in others:
            until = time.monotonic() + 10
            while not client.has_news and time.monotonic() < until:
                time.sleep(0.01)
            assert "rank 0 on a was lost in a test: its connection " in str(client.failure(-1, [0, 1, 2], "a test"))
    for client in others:
        client.arrive("after", 1, [1, 2], client.rank)
    assert [client.wait_arrivals("after", 1, 10) for client in others] == [[1, 2]] * 2
    JobStore(others[0]).set("after", "yes")
    for client in others:
        client.close()
    assert has_ended(pid, 5), "it does not outlive the last rank"


@pytest.mark.long
def test_coordinator_process_ends_if_not_all_ranks_come(process: CoordinatorProcess) -> None:
    client = connect(process.port, 0)
    meet(client)
    client.close()
    assert not has_ended(process.pid, 0.5), "another rank may be about to come, and is told that this one has left"
    late = connect(process.port, 1)
    JobStore(late).set("key", "value")
    assert late.has_left(0)
    late._stream.shutdown(2)
    assert has_ended(process.pid, 15)


def test_coordinator_process_is_not_ended_with_its_ranks(process: CoordinatorProcess) -> None:
    """Signals for the group of rank 0, or from a terminal, must not end what tells the others."""
    client = connect(process.port, 0)
    meet(client)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(process.pid, number)
    JobStore(client).set("key", "value")
    assert os.getsid(process.pid) != os.getsid(0)
    client.close()


def test_coordinator_process_that_is_killed_is_named_by_all_ranks(
    process: CoordinatorProcess, caplog: pytest.LogCaptureFixture
) -> None:
    clients = [connect(process.port, rank) for rank in range(3)]
    meet(*clients)
    with caplog.at_level(logging.ERROR, logger="mimatrix"):
        os.kill(process.pid, signal.SIGKILL)
        for client in clients:
            with pytest.raises(WorldError, match="the coordinator of this job, a process on a, was lost in"):
                JobStore(client).get("never", timeout_s=20)
        until = time.monotonic() + 5
        while not caplog.messages and time.monotonic() < until:
            time.sleep(0.01)
    # A coordinator of another test, which is taken down by a kill as well, may be told here too.
    assert set(caplog.messages) == {"the coordinator ended with exit code -9: it said nothing"}


def test_coordinator_process_shows_no_secret(process: CoordinatorProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.JOB_SECRET.name, TOKEN)
    second = start_coordinator("127.0.0.1", 0, TOKEN, 1)
    client = connect(second.port, 0)
    JobStore(client).set("key", "value")
    for name in ("cmdline", "environ"):
        assert TOKEN.encode() not in Path(f"/proc/{second.pid}/{name}").read_bytes()
    client.close()
    assert process.port != second.port


def test_coordinator_process_loads_nothing_that_is_installed() -> None:
    code = (
        "import mimatrix.comm.control.__main__, sys, json\n"
        "print(json.dumps([str(getattr(module, '__file__', '')) for module in sys.modules.values()]))"
    )
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-S", "-P", "-c", code],
        env=os.environ | {"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
    )
    foreign = [file for file in json.loads(done.stdout) if "site-packages" in file]
    assert foreign == []


def test_coordinator_address_that_is_not_of_this_host_is_refused() -> None:
    with pytest.raises(WorldError, match=r"no coordinator can be started at 192.0.2.1 .*; set MIMATRIX_ADDRESS"):
        start_coordinator("192.0.2.1", 0, TOKEN, 1)
