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
        ("failed.demand()", 1),
        ("failed.demand(); failed.cancel()", 0),
        ("failed.demand(); sys.exit()", 1),
        ("failed.demand(); raise UserError('it is 3; give 4')", 2),
        ("failed.demand(); failed.demand(); failed.cancel()", 0),
        ("failed.demand(); FailedExit().demand()", 1),
        ("pass", 0),
    ],
)
def test_a_failure_that_nobody_raised_is_exit_code_1(ending: str, code: int) -> None:
    done = run_python("-c", PREAMBLE + ending)
    assert done.returncode == code, done.stderr
    assert done.stdout == "first handler\n"


def test_a_failed_last_save_fails_the_process(tmp_path: Path) -> None:
    done = run_python(SCRIPT, "impossible folder", tmp_path)
    assert done.returncode == 1
    assert done.stderr.count("the checkpoint of step 2 is not saved: rank 0 could not begin a checkpoint") == 1
    assert done.stdout == "exit handler\n"


def check_ranks(how: str, tmp_path: Path, line: str) -> None:
    done = run_python("-m", "mimatrix.cli.main", "run", "-n", "2", SCRIPT, how, tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    lines = [each for each in (done.stdout + done.stderr).splitlines() if "is not saved" in each]
    (logged,) = [each for each in lines if each.startswith("[")]
    assert " ERROR mimatrix: " in logged
    assert logged.endswith(line)
    # Repeated at the end, if the rank that failed first is the one that logged it.
    assert [each for each in lines if each != logged] in ([], [f"mimatrix: rank {logged[1]} failed: {told(logged)}"])


def told(logged: str) -> str:
    return logged.partition(" ERROR mimatrix: ")[2]


def test_a_last_save_on_rank_0_only_fails_the_job_and_says_what_to_do(tmp_path: Path) -> None:
    line = "the checkpoint of step 2 is not saved: rank 1 ended without run.save; all ranks call run.save"
    check_ranks("rank 0 only", tmp_path, line)


@pytest.mark.long
def test_a_last_save_on_rank_1_only_fails_the_job_and_says_what_to_do(tmp_path: Path) -> None:
    check_ranks("rank 1 only", tmp_path, "rank 0 ended without run.save; all ranks call run.save")


@pytest.mark.long
def test_a_failed_last_save_on_all_ranks_is_logged_once(tmp_path: Path) -> None:
    check_ranks("impossible folder", tmp_path, "No such file or directory: '/proc/nope'")
