"""Control groups of a run: made, joined, removed, also those of a launcher that was killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from mimatrix.core.errors import UserError
from mimatrix.lab import CpuGroups, this_machine
from mimatrix.launch.quotas import PREFIX, quotas, remove_remains


def _groups() -> CpuGroups | None:
    """Where quotas can be set here, if they can."""
    try:
        with quotas({0: 1.0}):
            return this_machine()
    except UserError:
        return None


GROUPS = _groups()
needs_groups = pytest.mark.skipif(GROUPS is None, reason="needs control groups for processors")


def named(pid: int) -> list[Path]:
    return GROUPS.named(f"{PREFIX}{pid}-") if GROUPS else []


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    yield
    assert named(os.getpid()) == []


@needs_groups
def test_groups_are_there_and_then_gone() -> None:
    with quotas({1: 0.5, 2: 0.25}) as joins:
        assert list(joins) == [1, 2]
        assert [path.parent for path in joins.values()] == named(os.getpid())
        assert all(path.is_file() for path in joins.values())
        remove_remains()
        assert len(named(os.getpid())) == 2, "the groups of a launcher that lives stay"


@needs_groups
def test_groups_go_after_a_failure_and_with_who_is_in_them() -> None:
    inside = subprocess.Popen(["sleep", "60"], start_new_session=True)
    with suppress(ZeroDivisionError), quotas({0: 0.5}) as joins:
        joins[0].write_text(str(inside.pid))
        raise ZeroDivisionError
    assert inside.wait(timeout=10) == -signal.SIGKILL


def test_a_quota_that_the_kernel_refuses_is_refused_before() -> None:
    with pytest.raises(UserError, match="--slow-by signals"), quotas({0: 0.5, 1: 0.01}):
        pass


LAUNCHER = """
import sys, time
from mimatrix.launch.quotas import quotas
with quotas({0: 0.5, 1: 0.25}):
    print("up", flush=True)
    time.sleep(60)
"""


@needs_groups
def test_the_next_launcher_removes_what_a_killed_one_left() -> None:
    root = Path(__file__).resolve().parents[2]
    words = [sys.executable, "-c", LAUNCHER]
    with subprocess.Popen(words, cwd=root, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "up\n"
        launcher.kill()
        deadline = time.monotonic() + 10
        while b"Z" not in Path(f"/proc/{launcher.pid}/stat").read_bytes().rpartition(b")")[2].split():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert len(named(launcher.pid)) == 2
        # It is dead, though nobody has waited for it yet.
        remove_remains()
        assert named(launcher.pid) == []


@needs_groups
def test_a_number_that_came_back_does_not_protect() -> None:
    assert GROUPS is not None
    GROUPS.add(f"{PREFIX}{os.getpid()}-1-0", 0.5)
    remove_remains()
    assert named(os.getpid()) == []
