"""Jumps of the wall clock: noticed, and without effect on what goes by the monotonic clock."""

from dataclasses import dataclass

from mimatrix.server.controller.clocks import JUMP_S, PAUSE_S, ClockGuard, JobClock


@dataclass
class Clocks:
    wall_s: float = 1e9
    mono_s: float = 5.0

    def wall(self) -> float:
        return self.wall_s

    def monotonic(self) -> float:
        return self.mono_s

    def wait(self, seconds: float) -> None:
        self.wall_s, self.mono_s = self.wall_s + seconds, self.mono_s + seconds


def test_a_guard_lets_delete_while_the_clock_goes_evenly() -> None:
    clocks = Clocks()
    guard = ClockGuard(clocks.wall, clocks.monotonic)
    assert not guard.begin(newest_s=clocks.wall_s - 60)
    for _ in range(50):
        clocks.wait(3600)
        assert guard.check()


def test_a_guard_pauses_for_a_day_after_a_jump_in_either_direction() -> None:
    for jump_s in (20 * 365 * 86_400.0, -2 * JUMP_S):
        clocks = Clocks()
        guard = ClockGuard(clocks.wall, clocks.monotonic)
        guard.begin(None)
        assert guard.check()
        clocks.wall_s += jump_s
        assert not guard.check()
        clocks.wait(PAUSE_S - 1)
        assert not guard.check()
        clocks.wait(1)
        assert guard.check()


def test_a_guard_compares_a_start_with_the_newest_stored_row() -> None:
    for newest_s in (1e9 - 2 * JUMP_S, 1e9 + 2 * JUMP_S):
        clocks = Clocks()
        guard = ClockGuard(clocks.wall, clocks.monotonic)
        assert guard.begin(newest_s)
        assert not guard.check()


def test_a_time_limit_does_not_see_a_jump() -> None:
    clocks = Clocks()
    jobs = JobClock(clocks.wall, clocks.monotonic)
    started_s = clocks.wall_s - 100
    assert jobs.instant("started", 1, started_s) == clocks.mono_s - 100
    clocks.wall_s += 1e6
    assert jobs.now_s() - jobs.instant("started", 1, started_s) == 100
    jobs.forget_unused()
    assert jobs.now_s() - jobs.instant("started", 1, started_s) == 100


def test_a_start_with_a_wrong_clock_ends_no_running_job() -> None:
    """Only the time up to the newest stored row is known to have passed."""
    clocks = Clocks()
    jobs = JobClock(clocks.wall, clocks.monotonic)
    jobs.distrust_before(1e9 - 86_400)
    assert jobs.now_s() - jobs.instant("started", 1, 1e9 - 86_500) == 100
    jobs.trust()
    assert jobs.now_s() - jobs.instant("started", 2, 1e9 - 30) == 30
