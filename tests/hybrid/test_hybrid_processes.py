"""Groups as real processes: a single group is exact; others continue when a group or a server is killed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mimatrix.processes.ports import free_port

SCRIPT = str(Path(__file__).parent / "scripts" / "train_in_groups.py")
pytestmark = pytest.mark.timeout(150)


@contextmanager
def ranks(count: int, *words: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Start processes with torchrun's variables; at the end neither they nor their servers are left."""
    known = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port("127.0.0.1"))}
    known |= {"WORLD_SIZE": str(count), "OMP_NUM_THREADS": "1", "TEST_GROUPS": str(os.getpid())}
    started = [_started(words, known | {"RANK": str(rank)}) for rank in range(count)]
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


def _started(words: Sequence[str], known: Mapping[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, SCRIPT, *words], env=dict(known), text=True)


def again(rank: int, processes: list[subprocess.Popen[str]]) -> None:
    """Replace a rank by a new process with the same variables."""
    process = processes[rank]
    variables = (Path("/proc") / str(process.pid) / "environ").read_text().split("\0")
    known = dict(each.split("=", 1) for each in variables if each)
    assert isinstance(process.args, list)
    process.kill()
    process.wait()
    processes[rank] = _started(process.args[2:], known | {"TORCHELASTIC_RESTART_COUNT": "1"})


def begun(folder: Path, groups: int) -> None:
    """Back when so many groups have made some steps."""
    deadline = time.monotonic() + 60
    while len(list(folder.glob("*.begun"))) < groups:
        assert time.monotonic() < deadline, "the groups did not begin"
        time.sleep(0.1)


def services() -> list[int]:
    """Return the processes that serve shards for the ranks of this test, the oldest first."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words, variables = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes()
        except OSError:
            continue
        if b"mimatrix.hybrid.server.process" in words and f"TEST_GROUPS={os.getpid()}".encode() in variables.split(
            b"\0"
        ):
            found.append(int(folder.name))
    return sorted(found)


def ended(processes: list[subprocess.Popen[str]], within_s: float = 90) -> list[int]:
    deadline = time.monotonic() + within_s
    return [process.wait(max(0.1, deadline - time.monotonic())) for process in processes]


def told(folder: Path, group: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{group}.json").read_text())
    return found


@pytest.mark.long
def test_a_single_group_of_two_ranks_trains_like_mode_sync(tmp_path: Path) -> None:
    states = []
    for groups in ("[[0, 1]]", "null"):
        with ranks(2, str(tmp_path), groups, "3") as processes:
            assert ended(processes) == [0, 0]
        states.append(told(tmp_path, 0)["state"])
        (tmp_path / "0.json").unlink()
    assert states[0].keys() == states[1].keys()
    for name, values in states[0].items():
        assert values == pytest.approx(states[1][name], abs=1e-10)


@pytest.mark.parametrize(
    "killed",
    [
        pytest.param("a group", marks=pytest.mark.long),
        pytest.param("the first group", marks=pytest.mark.long),
        "a service",
    ],
)
def test_other_groups_continue_after_a_loss(tmp_path: Path, killed: str) -> None:
    with ranks(3, str(tmp_path), "[[0], [1], [2]]", "60", "0.02") as processes:
        begun(tmp_path, 3)
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
            assert sum(found["losses"][-5:]) < 0.7 * sum(found["losses"][:5])


@pytest.mark.long
@pytest.mark.parametrize("with_service", [False, True])
def test_a_lost_group_rejoins(tmp_path: Path, with_service: bool) -> None:
    """The second of three groups is killed, perhaps with its server, and rejoins: all train on together."""
    with ranks(3, str(tmp_path), "[[0], [1], [2]]", "200", "0.02") as processes:
        begun(tmp_path, 3)
        (tmp_path / "1.begun").unlink()
        if with_service:
            os.kill(_serving(processes[1].pid), signal.SIGKILL)
        again(1, processes)
        begun(tmp_path, 3)
        assert ended(processes) == [0] * 3
    losses = [told(tmp_path, group)["losses"] for group in range(3)]
    began = sum(losses[0][:5])
    for found in losses:
        assert len(found) > 20
        assert sum(found[-5:]) < 0.2 * began
    # A group that rejoins takes the common parameters: it does not start over.
    assert sum(losses[1][:5]) < 0.5 * began


@pytest.mark.long
def test_groups_resume_from_a_complete_checkpoint_after_kills(tmp_path: Path) -> None:
    """All groups save to one folder all the time, and everything is killed, three times over."""
    words = (str(tmp_path), "[[0], [1]]", "400", "0.005", "7")
    for _ in range(3):
        with ranks(2, *words) as processes:
            begun(tmp_path, 2)
            time.sleep(1.5)
            for pid in (*(process.pid for process in processes), *services()):
                os.kill(pid, signal.SIGKILL)
            ended(processes)
        for path in tmp_path.glob("*.begun"):
            path.unlink()
    with ranks(2, *words[:2], "1", "0", "7") as processes:
        assert ended(processes) == [0, 0]
    for group in range(2):
        loaded = [int(line) for line in (tmp_path / f"{group}.loaded").read_text().splitlines()]
        assert len(loaded) == 3
        assert loaded == sorted(loaded)
        assert loaded[0] > 0


LAUNCH = [
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


@pytest.mark.long
def test_launcher_leaves_other_groups_running(tmp_path: Path) -> None:
    known = os.environ | {"TEST_GROUPS": str(os.getpid())}
    command = [*LAUNCH, SCRIPT, str(tmp_path), '"launcher"', "60", "0.02"]
    process = subprocess.Popen(command, env=known, text=True, stdout=subprocess.PIPE)
    begun(tmp_path, 2)
    lost = _ranks()[2]
    os.kill(lost, signal.SIGKILL)
    said = json.loads(process.communicate(timeout=90)[0].splitlines()[-1])
    assert (process.returncode, said["reason"]) == (0, "[2] was killed by SIGKILL; the others finished")
    assert told(tmp_path, 0)["steps"] > 20


@pytest.mark.long
def test_launcher_restarts_only_the_lost_group(tmp_path: Path) -> None:
    """First the one of two ranks, then the one that has the store."""
    known = os.environ | {"TEST_GROUPS": str(os.getpid())}
    command = [*LAUNCH, "--max-restarts", "2", "--grace", "1s", SCRIPT, str(tmp_path), '"launcher"', "600", "0.02"]
    process = subprocess.Popen(command, env=known, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        begun(tmp_path, 2)
        for lost, stays in ((2, 0), (0, 1)):
            before = _ranks()
            (tmp_path / f"{lost // 2}.begun").unlink()
            os.kill(before[lost], signal.SIGKILL)
            begun(tmp_path, 2)
            after = _ranks()
            assert after[stays] == before[stays]
            assert after[lost] != before[lost]
        out, err = process.communicate(timeout=90)
    finally:
        process.kill()
    said = json.loads(out.splitlines()[-1])
    assert (process.returncode, said["reason"], said["restarts"]) == (0, "", 2)
    assert "rank 2 was killed by SIGKILL; group 1 will be started again (restart 1 of 2)" in err
    assert "rank 0 was killed by SIGKILL; group 0 will be started again (restart 2 of 2)" in err
    for group in range(2):
        assert told(tmp_path, group)["losses"][0] < 1.0


def _serving(parent: int) -> int:
    """Return the server that a live rank has started."""
    return next(
        pid for pid in services() if int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1]) == parent
    )


def _ranks() -> dict[int, int]:
    """Return the processes of the script by their ranks."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words, variables = (folder / "cmdline").read_bytes(), (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        ours = b"train_in_groups.py" in words and f"TEST_GROUPS={os.getpid()}".encode() in variables
        rank = next((each[5:] for each in variables if each.startswith(b"RANK=")), b"")
        if ours and rank:
            found[int(rank)] = int(folder.name)
    return found
