"""Control groups of a run: made, joined, removed, also those of a launcher that was killed."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from io import BytesIO
from pathlib import Path

import pytest

from mimatrix.core.errors import UserError
from mimatrix.launch import RunSpec, run_local
from mimatrix.launch.throttle.cpu_quota import PREFIX, memory_limits, quotas, remove_leftovers
from mimatrix.launch.throttle.memory_limit import limit_memory
from mimatrix.processes.cgroups import PERIOD_US, Cgroups, CpuCgroups, cpu_cgroups, memory_cgroups, period_us


def _groups() -> CpuCgroups | None:
    """Return the control groups in which CPU quotas can be set here, if they can."""
    try:
        with quotas({0: 1.0}):
            return cpu_cgroups()
    except UserError:
        return None


def _memory_cgroups() -> Cgroups | None:
    """Return the control groups in which memory limits can be set here, if they can."""
    try:
        with memory_limits({0: 1 << 30}):
            return memory_cgroups()
    except UserError:
        return None


GROUPS, MEMORY = _groups(), _memory_cgroups()
needs_groups = pytest.mark.skipif(GROUPS is None, reason="needs control groups for processors")
needs_memory = pytest.mark.skipif(MEMORY is None, reason="needs control groups for memory")


def named(pid: int) -> list[Path]:
    return [path for groups in (GROUPS, MEMORY) if groups for path in groups.find(f"{PREFIX}{pid}-")]


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
        remove_leftovers()
        assert len(named(os.getpid())) == 2, "the groups of a launcher that is_alive stay"


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


@pytest.mark.parametrize(("cpus", "period"), [(1.0, PERIOD_US), (0.25, PERIOD_US), (0.1, PERIOD_US), (0.05, 20_000)])
def test_the_period_is_as_short_as_the_kernel_lets_it_be(cpus: float, period: int) -> None:
    assert period_us(cpus) == period
    assert round(cpus * period_us(cpus)) >= 1_000


@needs_groups
def test_the_least_quota_can_be_set() -> None:
    with quotas({0: 0.05}):
        pass


@needs_memory
def test_memory_cgroups_are_there_and_then_gone() -> None:
    with memory_limits({0: 256 << 20, 1: 1 << 30}) as joins:
        assert all(path.is_file() for path in joins.values())
        limits = [path.parent / "memory.limit_in_bytes" for path in joins.values()]
        limits = [path if path.exists() else path.with_name("memory.max") for path in limits]
        assert [int(path.read_text()) for path in limits] == [256 << 20, 1 << 30]
        remove_leftovers()
        assert len(named(os.getpid())) == 2, "the groups of a launcher that is_alive stay"


EAT = "import os; print(len(bytearray(b'x') * (600 << 20)))"


@needs_memory
@pytest.mark.wording
def test_who_takes_too_much_is_killed_and_named() -> None:
    words = (sys.executable, "-S", "-u", "-c", EAT)
    out, err = BytesIO(), BytesIO()
    ended = run_local(RunSpec(words, memory=(256 << 20,), timeout_s=60), os.environ, out, err, lambda _: None)
    assert (ended.code, ended.describe()) == (128 + signal.SIGKILL, "rank 0 was killed by SIGKILL")
    enough = run_local(RunSpec(words, memory=(2 << 30,), timeout_s=60), os.environ, out, err, lambda _: None)
    assert (enough.code, out.getvalue()) == (0, f"[0] {600 << 20}\n".encode())


def test_without_groups_workers_are_told_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mimatrix.launch.throttle.cpu_quota.memory_cgroups", lambda: None)
    said: list[str] = []
    with limit_memory((1 << 30,), said.append) as joins:
        assert joins == {}
    assert len(said) == 1
    assert "the memory limit of the workers is not enforced" in said[0]


LAUNCHER = """
import sys, time
from mimatrix.launch.throttle.cpu_quota import memory_limits, quotas
with quotas({0: 0.5, 1: 0.25}), memory_limits({0: 1 << 30} if len(sys.argv) > 1 else {}):
    print("up", flush=True)
    time.sleep(60)
"""


@needs_groups
def test_the_next_launcher_removes_what_a_killed_one_left() -> None:
    root = Path(__file__).resolve().parents[2]
    words = [sys.executable, "-c", LAUNCHER, *(["memory"] if MEMORY else [])]
    with subprocess.Popen(words, cwd=root, stdout=subprocess.PIPE, text=True) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "up\n"
        launcher.kill()
        deadline = time.monotonic() + 10
        while b"Z" not in Path(f"/proc/{launcher.pid}/stat").read_bytes().rpartition(b")")[2].split():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert len(named(launcher.pid)) == 2 + bool(MEMORY)
        # It is dead, though nobody has waited for it yet.
        remove_leftovers()
        assert named(launcher.pid) == []


@needs_groups
def test_a_number_that_came_back_does_not_protect() -> None:
    assert GROUPS is not None
    GROUPS.add(f"{PREFIX}{os.getpid()}-1-0", 0.5)
    remove_leftovers()
    assert named(os.getpid()) == []
