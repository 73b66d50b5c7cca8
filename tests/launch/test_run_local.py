"""Workers on this machine, in the process of the test: what they are told, who is started again, what stays behind."""

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import pytest

from mimatrix.core.errors import UserError
from mimatrix.launch import RunResult, RunSpec, run_local
from mimatrix.launch.environment import RunAttempt, build_environment, omp_num_threads
from mimatrix.launch.local_run import Finish, Restart, decide
from mimatrix.processes.group_exit import GroupExit
from mimatrix.processes.ports import free_port

TELL = "import json, os; print(json.dumps(dict(os.environ)))"
FAIL_ONCE = """
import os, sys, time
count, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
print(count, os.environ["MASTER_PORT"], os.environ["TORCHELASTIC_RUN_ID"], os.environ["TORCHELASTIC_MAX_RESTARTS"])
if rank == "1" and int(count) < int(sys.argv[1]):
    {}
"""


def python(code: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-S", "-u", "-c", code, *arguments)


def run(launch: RunSpec, say: Callable[[str], None] = lambda _: None) -> tuple[RunResult, list[str], list[str]]:
    out, err = BytesIO(), BytesIO()
    outcome = run_local(launch, os.environ, out, err, say)
    return outcome, sorted(out.getvalue().decode().splitlines()), sorted(err.getvalue().decode().splitlines())


def test_workers_are_told_what_torchrun_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    outcome, out, _ = run(RunSpec(python(TELL), ranks=3, timeout_s=30))
    assert (outcome.code, outcome.describe(), outcome.restarts, outcome.ranks, outcome.slowed_by) == (0, "", 0, 3, "")
    for rank, line in enumerate(out):
        assert line.startswith(f"[{rank}] ")
        told = json.loads(line.removeprefix(f"[{rank}] "))
        assert {told[name] for name in ("RANK", "LOCAL_RANK", "ROLE_RANK")} == {str(rank)}
        assert {told[name] for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "ROLE_WORLD_SIZE")} == {"3"}
        assert (told["GROUP_RANK"], told["GROUP_WORLD_SIZE"], told["ROLE_NAME"]) == ("0", "1", "default")
        assert told["MASTER_ADDR"] == "127.0.0.1"
        assert told["OMP_NUM_THREADS"] == "1"
        assert told["TORCHELASTIC_RESTART_COUNT"] == told["TORCHELASTIC_MAX_RESTARTS"] == "0"
    assert len({json.loads(line[4:])["MASTER_PORT"] for line in out}) == 1


def test_ranks_of_one_launch_share_a_secret() -> None:
    launch = RunSpec(python("import os; print(os.environ['MIMATRIX_JOB_SECRET'])"), ranks=2, timeout_s=30)
    seen = [{line.partition("] ")[2] for line in run(launch)[1]} for _ in range(2)]
    assert [len(secrets) for secrets in seen] == [1, 1], "all ranks have the same"
    assert seen[0] != seen[1]
    assert len(seen[0].pop()) == 64


def test_what_a_torchrun_outside_left_is_not_passed_on() -> None:
    outside = {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_ERROR_FILE": "/x", "RANK": "7", "MINE": "yes"}
    told = build_environment(RunAttempt(2, 1234, "id", 1, 3, "1"), 0, outside)
    assert told["TORCHELASTIC_USE_AGENT_STORE"] == "False"
    assert "TORCHELASTIC_ERROR_FILE" not in told
    assert (told["RANK"], told["MINE"], told["TORCHELASTIC_RESTART_COUNT"]) == ("0", "yes", "1")


def test_workers_are_told_what_they_play(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIMATRIX_SPEED", "0.7")
    monkeypatch.setenv("MIMATRIX_MEMORY", "77")
    launch = RunSpec(python(TELL), ranks=2, speeds=(1.0, 0.5), slow_by="signals", timeout_s=30)
    told = [json.loads(line[4:]) for line in run(launch)[1]]
    assert [each.get("MIMATRIX_SPEED") for each in told] == [None, "0.5"]
    assert [each.get("MIMATRIX_MEMORY") for each in told] == ["77", "77"], "what the person set outside stays"
    launch = RunSpec(python(TELL), ranks=2, memory=(1 << 30, 2 << 30), timeout_s=30)
    told = [json.loads(line[4:]) for line in run(launch)[1]]
    assert [each["MIMATRIX_MEMORY"] for each in told] == [str(1 << 30), str(2 << 30)]


def test_threads() -> None:
    assert omp_num_threads(None, {}) == "1"
    assert omp_num_threads(None, {"OMP_NUM_THREADS": "4"}) == "4"
    assert omp_num_threads(2, {"OMP_NUM_THREADS": "4"}) == "2"


def test_ports_are_new() -> None:
    taken: set[int] = set()
    assert len({free_port(taken=taken) for _ in range(20)}) == 20 == len(taken)


def test_ports_are_none_that_the_kernel_gives_away_meanwhile() -> None:
    first, last = (int(word) for word in Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    found = {free_port("127.0.0.1") for _ in range(20)}
    assert not any(first <= port <= last for port in found)
    with socket.create_server(("127.0.0.1", free_port("127.0.0.1"))) as listener:
        assert listener.getsockname()[1] not in range(first, last + 1)


LOST = GroupExit.failed("1", -9)


@pytest.mark.parametrize(
    ("ended", "restarts", "sentence"),
    [
        (GroupExit(), 0, ""),
        (LOST, 2, "rank 1 was killed by SIGKILL after 2 restarts"),
        (GroupExit.failed("3", 2), 0, "rank 3 ended with exit code 2"),
        # A worker may choose the codes that we use when no worker was lost.
        (GroupExit.failed("0", 124), 2, "rank 0 ended with exit code 124 after 2 restarts"),
        (GroupExit.timed_out(0.1), 0, "not done after 9 s"),
        (GroupExit.interrupted(15), 0, "ended by SIGTERM"),
    ],
)
@pytest.mark.wording
def test_run_is_not_restarted(ended: GroupExit, restarts: int, sentence: str) -> None:
    decision = decide(ended, RunSpec(("true",), ranks=4, max_restarts=2, timeout_s=9), restarts)
    assert isinstance(decision, Finish)
    result = RunResult(exit=decision.exit, restarts=restarts, seconds=1.0, ranks=4, slowed_by="")
    assert (result.code, result.describe()) == (ended.code, sentence)


@pytest.mark.parametrize(("restarts", "number"), [(0, 1), (1, 2)])
@pytest.mark.wording
def test_run_is_restarted_after_a_loss(restarts: int, number: int) -> None:
    decision = decide(LOST, RunSpec(("true",), ranks=4, max_restarts=2, timeout_s=9), restarts)
    assert decision == Restart(failure=LOST, number=number, limit=2, who="all 4 ranks")
    again = f"all 4 ranks will be started again (restart {number} of 2)"
    assert decision.describe() == f"rank 1 was killed by SIGKILL; {again}"


@pytest.mark.parametrize("loss", ["os.kill(os.getpid(), 9)", "sys.exit(3)"])
@pytest.mark.wording
def test_a_lost_worker_is_started_again_with_all_others(loss: str) -> None:
    said: list[str] = []
    words = python(FAIL_ONCE.format(loss), "2")
    outcome, out, _ = run(RunSpec(words, ranks=2, max_restarts=3, grace_s=0.2, timeout_s=60), said.append)
    assert (outcome.code, outcome.describe(), outcome.restarts) == (0, "", 2)
    assert [sentence.startswith("rank 1 ") for sentence in said] == [True, True]
    told = [line.split()[1:] for line in out]
    assert {count for count, *_ in told} == {"0", "1", "2"}
    assert len({port for _, port, *_ in told}) == 3
    assert len({run_id for _, _, run_id, _ in told}) == 1
    assert {most for *_, most in told} == {"3"}


GROUPS = """
import os, sys, time
count, rank, (lives, code, gate) = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"], sys.argv[1:]
print("begins", count, os.environ["MASTER_PORT"], os.environ["MIMATRIX_RENDEZVOUS"])
if rank == "2" and int(count) < int(lives):
    sys.exit(int(code))
while rank == "0" and not os.path.exists(gate):
    time.sleep(0.01)
"""
"""Rank 2 fails in so many of its lives with this code; rank 0 goes on until the gate is there."""


def run_apart(gate: Path, lives: int, code: int, most: int, last: str) -> tuple[RunResult, list[str], list[str]]:
    """How it ended, what was printed and what was said; the gate opens once `last` is."""
    said: list[str] = []

    def say(sentence: str) -> None:
        said.append(sentence)
        if sentence == last:
            gate.touch()

    words = python(GROUPS, str(lives), str(code), str(gate))
    apart = RunSpec(words, 3, max_restarts=most, grace_s=0.1, timeout_s=60, groups=((0,), (1, 2)))
    outcome, out, _ = run(apart, say)
    return outcome, out, said


@pytest.mark.wording
def test_a_lost_group_is_started_again_and_no_other(tmp_path: Path) -> None:
    told = "rank 2 ended with exit code 3; group 1 will be started again (restart {} of 5)"
    outcome, out, said = run_apart(tmp_path / "gate", 2, 3, 5, told.format(2))
    assert (outcome.code, outcome.describe(), outcome.restarts) == (0, "", 2)
    assert said == [told.format(1), told.format(2)]
    began = [line.split() for line in out]
    assert [count for rank, _, count, *_ in began if rank == "[0]"] == ["0"]
    assert [count for rank, _, count, *_ in began if rank == "[2]"] == ["0", "1", "2"]
    assert len({(port, meeting) for *_, port, meeting in began}) == 1
    assert not Path(began[0][-1]).parent.exists()


@pytest.mark.parametrize(("most", "code"), [(1, 3), (5, 2)])
@pytest.mark.wording
def test_a_group_that_cannot_be_helped_leaves_the_others_running(tmp_path: Path, most: int, code: int) -> None:
    lost = f"group 1 was lost, the others keep training: rank 2 ended with exit code {code}"
    outcome, _, said = run_apart(tmp_path / "gate", 9, code, most, lost)
    assert said[-1] == lost
    assert outcome.describe() == f"[2] ended with exit code {code}; the others finished"
    assert (outcome.code, outcome.restarts) == (0, 1 if code == 3 else 0)


@pytest.mark.wording
def test_restarts_are_counted() -> None:
    words = python(FAIL_ONCE.format("sys.exit(3)"), "9")
    outcome, _, _ = run(RunSpec(words, ranks=2, max_restarts=1, grace_s=0, timeout_s=60))
    assert (outcome.code, outcome.restarts) == (3, 1)
    assert outcome.describe() == "rank 1 ended with exit code 3 after 1 restart"


@pytest.mark.wording
def test_bad_input_is_final() -> None:
    outcome, _, _ = run(RunSpec(python("raise SystemExit(2)"), max_restarts=5, timeout_s=30))
    assert (outcome.code, outcome.restarts, outcome.describe()) == (2, 0, "rank 0 ended with exit code 2")


@pytest.mark.wording
def test_the_timeout_holds_over_restarts() -> None:
    began = time.monotonic()
    outcome, _, _ = run(RunSpec(python("raise SystemExit(1)"), max_restarts=1000, timeout_s=2.0))
    assert (outcome.code, outcome.describe()) == (124, "not done after 2 s")
    assert outcome.restarts > 0
    assert time.monotonic() - began < 20


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.wording
def test_a_signal_between_two_attempts_is_heard(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    outcome, _, _ = run(
        RunSpec(python("raise SystemExit(1)"), max_restarts=9, timeout_s=30), lambda _: os.kill(os.getpid(), number)
    )
    assert (outcome.code, outcome.describe(), outcome.restarts) == (128 + number, f"ended by {number.name}", 0)
    assert signal.getsignal(number) == before


SPIN_S = 1.2
SPIN = f"""
import time
began, end = time.process_time(), time.monotonic() + {SPIN_S}
while time.monotonic() < end: pass
print(time.process_time() - began)
"""


def used(way: str) -> list[float]:
    launch = RunSpec(python(SPIN), ranks=2, speeds=(1.0, 0.25), slow_by=way, threads=1, timeout_s=60)
    outcome, out, _ = run(launch)
    assert (outcome.code, outcome.slowed_by) == (0, way), outcome
    return [float(line.split()[1]) for line in out]


@pytest.mark.parametrize("way", ["quota", "signals"])
def test_a_quarter_of_the_speed_is_a_quarter_of_the_processor(way: str) -> None:
    """Other work on the machine may take from either, but nothing gives the slow one more than its quarter."""
    seconds = []
    for _ in range(3):
        try:
            full, quarter = used(way)
        except UserError as error:
            pytest.skip(str(error))
        seconds.append((full, quarter))
        if 0.1 < quarter / SPIN_S < 0.35 and quarter < full:
            return
    pytest.fail(f"of {SPIN_S} s the fast worker and the slow one had {seconds}")


def test_a_speed_too_small_for_a_quota_goes_by_signals() -> None:
    launch = RunSpec(python("print(1)"), speeds=(0.04,), threads=1, timeout_s=60)
    assert run(launch)[0].slowed_by == "signals"
    with pytest.raises(UserError, match="signals"):
        run(RunSpec(python("print(1)"), speeds=(0.04,), threads=1, slow_by="quota"))


STUBBORN = """
import os, signal, subprocess, time
signal.signal(signal.SIGTERM, lambda *_: (print("told", flush=True), os._exit(0)))
child = subprocess.Popen(["sleep", "60"])
print(os.getpid(), child.pid)
if os.environ["RANK"] == "0":
    time.sleep(0.5)
    os._exit(5)
time.sleep(60)
"""


@pytest.mark.wording
def test_a_slow_worker_can_say_what_it_misses_and_nobody_stays() -> None:
    launch = RunSpec(python(STUBBORN), ranks=2, speeds=(1, 0.3), slow_by="signals", grace_s=0.3, timeout_s=30)
    outcome, out, _ = run(launch)
    assert (outcome.code, outcome.describe()) == (5, "rank 0 ended with exit code 5")
    assert "[1] told" in out
    pids = [pid for line in out if "told" not in line for pid in line.split()[1:]]
    assert len(pids) == 4
    deadline = time.monotonic() + 10
    while any(_lives(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(_lives(pid) for pid in pids)


def _lives(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
