"""Processes that start and end together; none of it needs root."""

import os
import signal
import subprocess
import sys
import time
from io import BytesIO
from pathlib import Path

import pytest

from mimatrix.processes.group import Command, run_process_group
from mimatrix.processes.group_exit import GroupExit

ROOT = Path(__file__).resolve().parents[2]


def crew(*scripts: str) -> list[Command]:
    return [
        Command(f"{rank} n{rank}", ("sh", "-c", script), os.environ | {"RANK": str(rank)})
        for rank, script in enumerate(scripts)
    ]


def run(*scripts: str, grace_s: float = 10.0, timeout_s: float | None = 20.0) -> tuple[GroupExit, list[str], list[str]]:
    out, err = BytesIO(), BytesIO()
    ending = run_process_group(crew(*scripts), out, err, grace_s=grace_s, timeout_s=timeout_s)
    return ending, sorted(out.getvalue().decode().splitlines()), sorted(err.getvalue().decode().splitlines())


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"
    except FileNotFoundError:
        return False


def gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + 10
    while any(map(lives, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(lives, pids))


def test_lines_have_labels_and_streams_stay_apart() -> None:
    ending, out, err = run("echo a$RANK; echo b >&2", "printf 'x\\n\\ny'")
    assert ending == GroupExit()
    assert out == ["[0 n0] a0", "[1 n1] ", "[1 n1] x", "[1 n1] y"]
    assert err == ["[0 n0] b"]


def test_a_line_without_end_is_passed_on() -> None:
    _, out, _ = run("head -c 300000 /dev/zero | tr '\\0' x")
    assert "".join(line.removeprefix("[0 n0] ") for line in out) == "x" * 300_000


def test_the_first_failure_is_the_code_and_ends_the_others() -> None:
    began = time.monotonic()
    ending, out, _ = run("sleep 0.1; exit 3", "trap 'echo told; exit 7' TERM; sleep 30 & wait", grace_s=0.2)
    assert ending == GroupExit.failed("0 n0", 3)
    assert out == ["[1 n1] told"]
    assert time.monotonic() - began < 5


def test_who_stopped_because_of_a_lost_peer_gives_way_to_who_failed() -> None:
    ending, _, _ = run("exit 76", "sleep 0.3; echo first >&2; echo why >&2; exit 3")
    assert ending == GroupExit.failed("1 n1", 3)
    assert (ending.label, ending.last_line) == ("1 n1", "why")


def test_who_is_ended_after_a_lost_peer_is_not_to_blame() -> None:
    assert run("exit 76", "sleep 30", grace_s=0.1)[0] == GroupExit.failed("0 n0", 76)


def test_an_error_that_all_write_alike_is_passed_on_once() -> None:
    script = "echo 'mimatrix: wrong' >&2; echo 'mimatrix: told'; echo other >&2"
    _, out, err = run(script, script)
    assert len([line for line in err if line.endswith("mimatrix: wrong")]) == 1
    assert len([line for line in err if line.endswith("other")]) == 2
    assert len(out) == 2


def teams(*scripts: tuple[str, str], grace_s: float = 10.0) -> tuple[GroupExit, list[str]]:
    out = BytesIO()
    commands = [
        Command(str(rank), ("sh", "-c", script), os.environ, subgroup=team)
        for rank, (team, script) in enumerate(scripts)
    ]
    ending = run_process_group(commands, out, BytesIO(), timeout_s=20, grace_s=grace_s)
    return ending, sorted(out.getvalue().decode().splitlines())


def test_a_team_that_fails_ends_alone() -> None:
    began = time.monotonic()
    ending, said = teams(("a", "sleep 1; echo well"), ("b", "exit 3"), ("b", "sleep 30"), grace_s=0.1)
    assert ending == GroupExit(lost=(GroupExit.failed("1", 3),))
    assert said == ["[0] well"]
    assert time.monotonic() - began < 10


def test_where_all_teams_fail_the_first_counts() -> None:
    assert teams(("a", "sleep 0.3; exit 4"), ("b", "exit 3"))[0] == GroupExit.failed("1", 3)


def test_within_the_grace_the_others_may_finish() -> None:
    ending, out, _ = run("exit 3", "sleep 0.3; echo done")
    assert ending.code == 3
    assert out == ["[1 n1] done"]


def test_who_does_not_listen_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mimatrix.processes.group._KILL_S", 0.3)
    ending, _, _ = run("kill -9 $$", "trap '' TERM; while :; do sleep 0.1; done", grace_s=0)
    assert ending == GroupExit.failed("0 n0", -9)


def test_a_deadline_ends_all() -> None:
    ending, _, _ = run("sleep 30", "sleep 30", timeout_s=0.2)
    assert ending == GroupExit.timed_out(0.2)


def test_who_stays_behind_is_killed_and_nobody_waits_for_him() -> None:
    began = time.monotonic()
    _, out, _ = run("sleep 60 & echo $!")
    assert gone([int(out[0].split()[-1])])
    assert time.monotonic() - began < 5


def test_a_file_is_joined_before_the_start(tmp_path: Path) -> None:
    out = BytesIO()
    command = Command("0 n0", ("cat", str(tmp_path / "procs")), os.environ, tmp_path / "procs")
    run_process_group([command], out, BytesIO(), timeout_s=10)
    assert out.getvalue() == b"[0 n0] 0\n"


RUNNER = """
import os, sys
from mimatrix.processes.group import Command, run_process_group
script = "sleep 60 & echo $! $$; wait"
ending = run_process_group([Command(str(r), ("sh", "-c", script), os.environ) for r in range(2)],
                      sys.stdout.buffer, sys.stderr.buffer)
print(ending.describe(), flush=True)
sys.exit(ending.code)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_when_the_runner_ends_all_end(number: signal.Signals) -> None:
    words = [sys.executable, "-c", RUNNER]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT) as runner:
        assert runner.stdout is not None
        pids = [int(pid) for _ in range(2) for pid in runner.stdout.readline().split()[1:]]
        assert len(pids) == 4
        assert all(map(lives, pids))
        runner.send_signal(number)
        code = runner.wait(timeout=20)
    assert gone(pids)
    assert code == (-9 if number == signal.SIGKILL else 128 + number)


def test_other_signals_that_somebody_minds_end_nothing() -> None:
    """Torch's loaders, for one, mind the deaths of children."""
    before = signal.signal(signal.SIGCHLD, lambda *_: None)
    try:
        ending, _, _ = run("sh -c true", "sleep 0.3")
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert ending == GroupExit()
