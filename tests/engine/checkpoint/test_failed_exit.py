"""A process whose last checkpoint failed does not end with success."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "last_save.py"
PREAMBLE = """
import atexit, sys
from mimatrix.core.errors import UserError
from mimatrix.engine.checkpoint.failed_exit import FailedExit
from mimatrix.engine.excepthook import install_excepthook
install_excepthook()
atexit.register(print, "first handler")
failed = FailedExit()
"""


def run_python(*words: object, timeout_s: float = 60) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("failed.demand('why')", 1),
        ("failed.demand('why', 2)", 2),
        ("failed.demand('why'); failed.cancel()", 0),
        ("failed.demand('why'); sys.exit()", 1),
        ("failed.demand('why'); raise UserError('it is 3; give 4')", 2),
        ("failed.demand('why'); failed.demand('why'); failed.cancel()", 0),
        ("failed.demand('why'); FailedExit().demand('why')", 1),
        ("pass", 0),
    ],
)
def test_a_failure_that_nobody_raised_is_exit_code_1(ending: str, code: int) -> None:
    done = run_python("-c", PREAMBLE + ending)
    assert done.returncode == code, done.stderr
    assert done.stdout == "first handler\n"
    assert done.stderr.endswith("mimatrix: why\n") == ("demand" in ending and code in (1, 2) and "raise" not in ending)


def test_a_failed_last_save_fails_the_process(tmp_path: Path) -> None:
    done = run_python(SCRIPT, "impossible folder", tmp_path)
    assert done.returncode == 1
    logged, last = done.stderr.splitlines()
    assert " ERROR mimatrix: the checkpoint of step 2 is not saved: rank 0 could not begin a checkpoint" in logged
    assert last == f"mimatrix: {told(logged)} ({line_of('/proc/nope')})"
    assert done.stdout == "exit handler\n"


def check_ranks(how: str, tmp_path: Path, code: int, line: str) -> None:
    done = run_python("-m", "mimatrix.cli.main", "run", "-n", "2", SCRIPT, how, tmp_path)
    assert done.returncode == code, done.stdout + done.stderr
    lines = [each for each in done.stderr.splitlines() if " ERROR " not in each]
    sentence = f"the checkpoint of step 2 is not saved: {line}"
    ranks, last = lines[:-1], lines[-1]
    # Every rank that fails says why, and what they say alike is shown once; it is also the last line.
    assert [each[4:] for each in ranks] == [f"mimatrix: {sentence}"]
    assert last in [f"mimatrix: rank {rank} failed: {sentence}" for rank in range(2)]


def told(logged: str) -> str:
    return logged.partition(" ERROR mimatrix: ")[2].partition("; training continues, ")[0]


def line_of(text: str, below: int = 0) -> str:
    """Return where the script has a text, or a line below it."""
    lines = SCRIPT.read_text().splitlines()
    return f"{SCRIPT.name}, line {1 + below + next(n for n, line in enumerate(lines) if text in line)}"


def ended(rank: int) -> str:
    """Return what is said about a save that only another rank came to, with its line."""
    wanted = "if run.rank == 0" if rank else "if run.rank == 1"
    return (
        f"rank {rank} has ended, and rank {1 - rank} waits for it in run.save at step 2 ({line_of(wanted, 1)}); "
        "call run.save on all ranks"
    )


def test_a_last_save_on_rank_0_only_fails_the_job_and_says_what_to_do(tmp_path: Path) -> None:
    check_ranks("rank 0 only", tmp_path, 2, ended(1))


@pytest.mark.long
def test_a_last_save_on_rank_1_only_fails_the_job_and_says_what_to_do(tmp_path: Path) -> None:
    check_ranks("rank 1 only", tmp_path, 2, ended(0))


@pytest.mark.long
def test_a_failed_last_save_on_all_ranks_is_the_last_line(tmp_path: Path) -> None:
    line = "rank 0 could not begin a checkpoint: FileNotFoundError: [Errno 2] No such file or directory: '/proc/nope'"
    check_ranks("impossible folder", tmp_path, 1, f"{line} ({line_of('/proc/nope')})")
