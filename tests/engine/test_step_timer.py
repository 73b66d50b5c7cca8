"""Where the time of a step goes, and how ranks of several hosts find out for whom they wait."""

import time
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from mimatrix.comm.group import Group
from mimatrix.engine.step_timer import StepStats, StepTimer


class FakeClock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def perf_counter(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


class FakeGroup:
    """A group of ranks that have waited for each other in memory for so long, if they share a host."""

    def __init__(self, *, maps_peers: bool) -> None:
        self.maps_peers, self.bytes_moved = maps_peers, Counter[str]()
        self.sync = SimpleNamespace(waited_s=0.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> FakeClock:
    clock = FakeClock()
    monkeypatch.setattr(time, "perf_counter", clock.perf_counter)
    return clock


def timer_of(*groups: FakeGroup) -> StepTimer:
    timer = StepTimer(groups=cast("tuple[Group, ...]", groups))
    timer.restart()
    return timer


def take_step(timer: StepTimer, clock: FakeClock, *, busy_s: float, exposed_s: float) -> Callable[[], StepStats]:
    """Compute and communicate for so long; return what ends the step."""
    clock.sleep(busy_s)
    with timer.exposed():
        clock.sleep(exposed_s)
    return lambda: timer.end_step(1, 8, {})


def test_work_is_known_between_hosts_without_the_time_in_collectives(clock: FakeClock) -> None:
    timer = timer_of(FakeGroup(maps_peers=True), FakeGroup(maps_peers=False))
    take_step(timer, clock, busy_s=2.0, exposed_s=5.0)
    assert timer.busy_s_if_known() == pytest.approx(2.0)


def test_work_is_not_asked_for_where_ranks_see_each_other_in_memory(clock: FakeClock) -> None:
    assert timer_of(FakeGroup(maps_peers=True)).busy_s_if_known() is None
    assert timer_of().busy_s_if_known() is None


def test_work_of_a_gpu_is_not_asked_for_as_that_would_wait(clock: FakeClock) -> None:
    timer = timer_of(FakeGroup(maps_peers=False))
    timer.device = torch.device("cuda")
    assert timer.busy_s_if_known() is None


def test_rank_between_hosts_waits_as_much_longer_as_the_slowest_works(clock: FakeClock) -> None:
    timer = timer_of(FakeGroup(maps_peers=False))
    end = take_step(timer, clock, busy_s=2.0, exposed_s=5.0)
    timer.note_busy([6.0, 2.0, 3.0], rank=1)
    stats = end()
    assert stats.waiting_s == pytest.approx(4.0)
    assert stats.communication_s == pytest.approx(1.0)
    assert stats.compute_s == pytest.approx(2.0)
    assert stats.seconds == pytest.approx(7.0)


def test_slowest_rank_between_hosts_waits_for_none(clock: FakeClock) -> None:
    timer = timer_of(FakeGroup(maps_peers=False))
    end = take_step(timer, clock, busy_s=6.0, exposed_s=1.0)
    timer.note_busy([6.0, 2.0, None], rank=0)
    stats = end()
    assert stats.waiting_s == 0
    assert stats.communication_s == pytest.approx(1.0)


def test_waiting_is_at_most_what_was_not_hidden(clock: FakeClock) -> None:
    timer = timer_of(FakeGroup(maps_peers=False))
    end = take_step(timer, clock, busy_s=2.0, exposed_s=1.0)
    timer.note_busy([2.0, 9.0], rank=0)
    stats = end()
    assert stats.waiting_s == pytest.approx(1.0)
    assert stats.communication_s == pytest.approx(0.0)


def test_rank_that_does_not_know_its_work_counts_what_it_saw_in_memory(clock: FakeClock) -> None:
    group = FakeGroup(maps_peers=True)
    timer = timer_of(group)
    end = take_step(timer, clock, busy_s=2.0, exposed_s=3.0)
    group.sync.waited_s += 2.5
    timer.note_busy([None, 9.0], rank=0)
    assert end().waiting_s == pytest.approx(2.5)


def test_waiting_of_one_step_is_not_counted_in_the_next(clock: FakeClock) -> None:
    timer = timer_of(FakeGroup(maps_peers=False))
    end = take_step(timer, clock, busy_s=2.0, exposed_s=5.0)
    timer.note_busy([6.0, 2.0], rank=1)
    end()
    stats = take_step(timer, clock, busy_s=2.0, exposed_s=5.0)()
    assert stats.waiting_s == 0
    assert stats.communication_s == pytest.approx(5.0)
