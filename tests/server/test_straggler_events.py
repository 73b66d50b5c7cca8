"""A worker that becomes slow, and one that stops inside of a collective, are named: real server, real ranks."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.servers import ServerProcess, server
from support.workers import process_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(180)]


def test_slow_and_stopped_workers_are_named(tmp_path: Path) -> None:
    with server(tmp_path / "data", devices=2) as there:
        number = there.submit("seen.py", "--devices", "2")
        there.until(number, lambda job: job.progress.step > 100)
        assert not _named(there, number, "rank")
        pid = process_of((there.data / "address").read_text().strip(), number, 1)
        with _slowed(pid):
            took = _until_named(there, number, "the others are idle because of rank 1 on ", within_s=20)
        assert took < 15  # ten are wanted; the rest is a margin for a busy machine
        os.kill(pid, signal.SIGSTOP)
        try:
            _until_named(there, number, "rank 1 on ", "has not entered all_reduce", "rank 0 waits for it", within_s=25)
            seen = there.command("top", "--once").stdout
            assert "<- holds the others up" in seen
            assert "has not entered all_reduce" in seen
        finally:
            os.kill(pid, signal.SIGCONT)
        assert "mimatrix: the others are idle because of rank 1" in there.command("logs", str(number)).stdout
        assert f"job {number}: the others are idle because of rank 1" in there.said()
        lines = there.command("metrics", str(number), "--csv").stdout.splitlines()
        assert lines[0].startswith("at,step,samples_per_s,step_s,predicted_step_s,loss,compute_s_rank0,compute_s_rank1")
        assert len(lines) > 2


def _named(there: ServerProcess, number: int, *words: str) -> bool:
    with there.client() as client:
        return any(all(word in event.reason for word in words) for event in client.events(number))


def _until_named(there: ServerProcess, number: int, *words: str, within_s: float) -> float:
    began = time.monotonic()
    while not _named(there, number, *words):
        assert time.monotonic() - began < within_s, there.command("top", "--once").stdout
        time.sleep(0.2)
    return time.monotonic() - began


@contextmanager
def _slowed(pid: int) -> Iterator[None]:
    """To less than half: it is stopped for two thirds of the time."""
    over = threading.Event()

    def slow() -> None:
        while not over.is_set():
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.02)
            os.kill(pid, signal.SIGCONT)
            time.sleep(0.01)

    thread = threading.Thread(target=slow)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
