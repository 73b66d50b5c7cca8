"""Groups as real processes: one alone is exact; others go on when a group or a service is killed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mimatrix.worker.ports import free_port

SCRIPT = str(Path(__file__).parent / "scripts" / "apart.py")
pytestmark = pytest.mark.timeout(150)


@contextmanager
def ranks(count: int, *words: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes with torchrun's variables; none of them is left, nor a service of theirs."""
    known = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1"))}
    known |= {"WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1", "TEST_APART": str(os.getpid())}
    started = [
        subprocess.Popen([sys.executable, SCRIPT, *words], env=known | {"RANK": str(rank)}, text=True)
        for rank in range(count)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()
        for _ in range(150):
            if not services():
                break
            time.sleep(0.1)
        left = services()
        for pid in left:
            os.kill(pid, signal.SIGKILL)
        assert left == []


def services() -> list[int]:
    """The processes that serve shards for the ranks of this test, the oldest first."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words, variables = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes()
        except OSError:
            continue
        if b"mimatrix.hybrid.host" in words and f"TEST_APART={os.getpid()}".encode() in variables.split(b"\0"):
            found.append(int(folder.name))
    return sorted(found)


def ended(processes: list[subprocess.Popen[str]], within_s: float = 90) -> list[int]:
    deadline = time.monotonic() + within_s
    return [process.wait(max(0.1, deadline - time.monotonic())) for process in processes]


def told(folder: Path, group: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{group}.json").read_text())
    return found


@pytest.mark.long
def test_one_group_of_two_ranks_is_the_synchronous_run(tmp_path: Path) -> None:
    states = []
    for groups in ("[[0, 1]]", "null"):
        with ranks(2, str(tmp_path), groups, "3") as processes:
            assert ended(processes) == [0, 0]
        states.append(told(tmp_path, 0)["state"])
        (tmp_path / "0.json").unlink()
    assert states[0].keys() == states[1].keys()
    for name, values in states[0].items():
        assert values == pytest.approx(states[1][name], abs=1e-10)


@pytest.mark.parametrize("killed", [pytest.param("a group", marks=pytest.mark.long), "the first group", "a service"])
def test_others_go_on(tmp_path: Path, killed: str) -> None:
    with ranks(3, str(tmp_path), "[[0], [1], [2]]", "60", "0.02") as processes:
        deadline = time.monotonic() + 60
        while len(list(tmp_path.glob("*.begun"))) < 3:
            assert time.monotonic() < deadline, "the groups did not begin"
            time.sleep(0.1)
        lost = {"a group": 1, "the first group": 0, "a service": None}[killed]
        if lost is None:
            os.kill(services()[1], signal.SIGKILL)
        else:
            processes[lost].kill()
        left = [process for number, process in enumerate(processes) if number != lost]
        assert ended(left) == [0] * len(left)
    for group in range(3):
        if group != lost:
            found = told(tmp_path, group)
            assert found["steps"] > 20
            assert sum(found["losses"][-5:]) < 0.2 * sum(found["losses"][:5])


@pytest.mark.long
def test_the_launcher_leaves_other_groups_running(tmp_path: Path) -> None:
    words = [
        sys.executable,
        "-m",
        "mimatrix.cli.main",
        "run",
        "-n",
        "3",
        "--groups",
        "0/1,2",
        "--timeout",
        "120",
        "--json",
    ]
    known = os.environ | {"TEST_APART": str(os.getpid())}
    command = [*words, SCRIPT, str(tmp_path), '"launcher"', "60", "0.02"]
    process = subprocess.Popen(command, env=known, text=True, stdout=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while len(list(tmp_path.glob("*.begun"))) < 2:
        assert time.monotonic() < deadline, "the groups did not begin"
        time.sleep(0.1)
    lost = _ranks()[2]
    os.kill(lost, signal.SIGKILL)
    said = json.loads(process.communicate(timeout=90)[0].splitlines()[-1])
    assert (process.returncode, said["reason"]) == (0, "[2] ended by SIGKILL; the others went on")
    assert told(tmp_path, 0)["steps"] > 20


def _ranks() -> dict[int, int]:
    """The processes of the script by their ranks."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words, variables = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        ours = b"apart.py" in words and f"TEST_APART={os.getpid()}".encode() in variables
        rank = next((each[5:] for each in variables if each.startswith(b"RANK=")), b"")
        if ours and rank:
            found[int(rank)] = int(folder.name)
    return found
