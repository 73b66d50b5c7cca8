"""The watchdog of NCCL's collectives: lost and late ranks end the communicators, and the next call names the rank."""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import NoReturn, cast

import pytest
import torch
from support.control import greet, start_coordinator
from support.fake_nccl import FakeStreamTask
from support.ranks import together

from mimatrix.collectives.schedule import Collective
from mimatrix.comm import nccl_watchdog
from mimatrix.comm.calls import CallSignature
from mimatrix.comm.control.call_log import CallLog
from mimatrix.comm.control.client import ControlClient
from mimatrix.comm.control.coordinator import Coordinator
from mimatrix.comm.control.messages import ControlMessage, MessageType
from mimatrix.comm.nccl_watchdog import NcclWatchdog
from mimatrix.core.errors import MiMatrixError, MismatchError, PeerLost, WorldError

HOSTS = ["a", "b", "c"]
SUM = CallSignature(Collective.ALL_REDUCE, torch.float32, "sum", 10, "c10d")
DOING = "all_reduce of 10 float32"
TIMEOUT_S = 60.0


@dataclass
class FakeBackend:
    """A communicator that counts how often it is aborted; `on_abort` may wait, or raise."""

    on_abort: Callable[[], object] = lambda: None
    aborts: int = 0
    is_aborted: threading.Event = field(default_factory=threading.Event)

    def abort(self) -> None:
        self.aborts += 1
        self.is_aborted.set()
        self.on_abort()


class FakeRank:
    """Another rank of the job: a bare connection to the coordinator, which can break."""

    def __init__(self, rank: int, coordinator: Coordinator) -> None:
        self.stream = greet(coordinator, rank, HOSTS[rank])
        self._send(MessageType.ARRIVE, {"group": "start", "ticket": 1, "members": [0, 1, 2], "payload": None})

    def vanish(self) -> None:
        self.stream.close()

    def leave(self) -> None:
        self._send(MessageType.BYE, {"begun": {}})

    def _send(self, message_type: MessageType, body: dict[str, object]) -> None:
        self.stream.sendall(ControlMessage(message_type, 3, body).encode())


@dataclass
class FakeControl:
    """A connection to a coordinator on which no rank is lost; complaints about late ones end with `verdict`."""

    rank = 0
    verdict: MiMatrixError | None = None
    complaints: list[tuple[str, int, tuple[int, ...], str, float]] = field(default_factory=list)
    has_news = False

    def check(self, peer: int, members: Sequence[int], doing: str) -> None:
        pass

    def failure(self, peer: int, members: Sequence[int], doing: str) -> None:
        pass

    def has_left(self, rank: int) -> bool:
        return False

    def report_unfinished(self, group: str, number: int, members: Sequence[int], doing: str, waited_s: float) -> None:
        self.complaints.append((group, number, tuple(members), doing, waited_s))
        if self.verdict:
            raise self.verdict


class FakeCallLog:
    """Counts reports."""

    reports = 0
    group = "pair/launched"

    def report(self) -> None:
        self.reports += 1


@dataclass
class WatchedJob:
    """Rank 0 of three, with its watchdog; the others are fakes."""

    control: ControlClient
    watchdog: NcclWatchdog
    others: dict[int, FakeRank]

    def watch(
        self, name: str, members: Sequence[int], backend: FakeBackend, task: FakeStreamTask | None = None
    ) -> CallLog:
        """Watch a group which, if a task is given, has launched a call."""
        calls = CallLog(name, members, self.control)
        self.watchdog.watch(name, members, backend, calls, TIMEOUT_S)
        if task:
            self.watchdog.note(name, calls.add(SUM, None), DOING, task)
        return calls


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"_POLL_S": 0.005, "_REPORT_AFTER_S": 0.05, "_LEFT_S": 0.1, "_ABORT_S": 0.2}.items():
        monkeypatch.setattr(nccl_watchdog, name, value)


@pytest.fixture
def job() -> Iterator[WatchedJob]:
    with ExitStack() as stack:
        coordinator = start_coordinator(world_size=3)
        stack.callback(coordinator.close, timeout_s=1.0)
        control = ControlClient.connect(0, HOSTS, "127.0.0.1", coordinator.port, 3, coordinator.token)
        stack.callback(control.close)
        others = {rank: FakeRank(rank, coordinator) for rank in (1, 2)}
        for other in others.values():
            stack.callback(other.vanish)
        control.arrive("start", 1, [0, 1, 2], None)
        assert control.wait_arrivals("start", 1, 5) is not None
        watchdog = NcclWatchdog(control)
        stack.callback(watchdog.close)
        yield WatchedJob(control, watchdog, others)


@pytest.fixture
def alone() -> Iterator[tuple[NcclWatchdog, FakeControl]]:
    """Yield a watchdog whose coordinator is a fake, and the fake."""
    control = FakeControl()
    watchdog = NcclWatchdog(cast(ControlClient, control))
    yield watchdog, control
    watchdog.close()


def running() -> bool:
    return False


def eventually(happens: Callable[[], object]) -> None:
    until = time.monotonic() + 5
    while not happens():
        assert time.monotonic() < until, "it does not happen"
        time.sleep(0.005)


def error_of(watchdog: NcclWatchdog, name: str) -> MiMatrixError:
    """Return what the next call of a group raises, once it does."""
    until = time.monotonic() + 5
    while time.monotonic() < until:
        try:
            watchdog.check(name, DOING)
        except MiMatrixError as error:
            return error
        time.sleep(0.005)
    raise AssertionError("no error")


@pytest.mark.parametrize("is_completed", [False, True])
def test_lost_member_aborts_the_group_and_is_named_by_the_next_call(job: WatchedJob, is_completed: bool) -> None:
    """Also if the call seems complete: c10d counts one as complete that has failed."""
    backend = FakeBackend()
    job.watch("all", [0, 1, 2], backend, FakeStreamTask(is_done=lambda: is_completed))
    job.watchdog.check("all", DOING)
    job.others[2].vanish()
    assert backend.is_aborted.wait(5)
    error = error_of(job.watchdog, "all")
    assert isinstance(error, PeerLost)
    assert error.rank == 2
    assert str(error).startswith(f"rank 2 on c was lost in {DOING}: its connection ")


def test_lost_member_aborts_the_group_although_its_gpu_has_failed(job: WatchedJob) -> None:
    def is_done() -> NoReturn:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    backend = FakeBackend()
    job.watch("all", [0, 1, 2], backend, FakeStreamTask(is_done))
    job.others[1].vanish()
    assert backend.is_aborted.wait(5)
    assert "rank 1 on b" in str(error_of(job.watchdog, "all"))


def test_all_groups_of_a_lost_rank_are_aborted_at_the_same_time_and_no_other(job: WatchedJob) -> None:
    """Each abort waits for the GPU, on which kernels of the other groups run."""
    both = threading.Barrier(2)
    together_aborted = [FakeBackend(lambda: both.wait(5)) for _ in range(2)]
    spared = FakeBackend()
    job.watch("all", [0, 1, 2], together_aborted[0], FakeStreamTask(running))
    job.watch("outer", [0, 2], together_aborted[1])
    job.watch("inner", [0, 1], spared, FakeStreamTask(running))
    job.others[2].vanish()
    for backend in together_aborted:
        assert backend.is_aborted.wait(5)
    eventually(lambda: both.n_waiting == 0)
    assert not both.broken, "one waited for the other in vain"
    assert "rank 2 on c" in str(error_of(job.watchdog, "outer"))
    assert not spared.is_aborted.wait(0.2)
    job.watchdog.check("inner", DOING)


def test_different_calls_abort_the_group(job: WatchedJob) -> None:
    backend = FakeBackend()
    job.watch("all", [0, 1, 2], backend, FakeStreamTask(running))
    with pytest.raises(MismatchError):
        job.control.report_mismatch("ranks disagree", [0, 1])
    assert backend.is_aborted.wait(5)
    assert isinstance(error_of(job.watchdog, "all"), MismatchError)


def test_backend_is_aborted_once_however_often_it_is_asked_for(job: WatchedJob) -> None:
    backend = FakeBackend(lambda: time.sleep(0.05))
    job.watch("all", [0, 1, 2], backend, FakeStreamTask(running))
    job.others[1].vanish()
    together(4, lambda _: job.watchdog.abort_all())
    assert backend.is_aborted.wait(5)
    error_of(job.watchdog, "all")
    job.watchdog.abort_all()
    assert backend.aborts == 1


def test_abort_that_fails_is_no_error(job: WatchedJob) -> None:
    def fail() -> NoReturn:
        raise RuntimeError("it is aborted already")

    backend = FakeBackend(fail)
    job.watch("all", [0, 1, 2], backend)
    job.watchdog.abort_all()
    assert backend.aborts == 1


def test_abort_that_hangs_does_not_stop_the_watchdog(job: WatchedJob) -> None:
    may_end = threading.Event()
    hanging, other = FakeBackend(lambda: may_end.wait(10)), FakeBackend()
    job.watch("hanging", [0, 2], hanging, FakeStreamTask(running))
    job.watch("other", [0, 1], other, FakeStreamTask(running))
    job.others[2].vanish()
    assert hanging.is_aborted.wait(5)
    job.others[1].vanish()
    assert other.is_aborted.wait(5)
    assert "rank 2 on c" in str(error_of(job.watchdog, "hanging"))
    started = time.monotonic()
    job.watchdog.abort_all()
    assert time.monotonic() - started < 2, "nor does a second call of abort_all"
    may_end.set()


def test_group_that_waits_for_a_member_that_has_left_fails(job: WatchedJob) -> None:
    backend = FakeBackend()
    job.watch("all", [0, 1, 2], backend, FakeStreamTask(running))
    job.others[1].leave()
    assert backend.is_aborted.wait(5)
    assert "rank 1 on b was lost" in str(error_of(job.watchdog, "all"))


def test_member_that_has_left_has_time_until_its_last_call_ends(
    job: WatchedJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its part is done: what it sent may still be on its way, however long ago the call began."""
    monkeypatch.setattr(nccl_watchdog, "_LEFT_S", 0.8)
    is_done, backend = threading.Event(), FakeBackend()
    job.watch("all", [0, 1, 2], backend, FakeStreamTask(is_done.is_set))
    assert not backend.is_aborted.wait(0.9), "the call takes longer than a rank that has left may"
    job.others[1].leave()
    eventually(lambda: job.control.has_left(1))
    assert not backend.is_aborted.wait(0.1)
    is_done.set()
    job.watchdog.check("all", DOING)


def test_member_that_leaves_after_its_last_call_is_not_missed(job: WatchedJob) -> None:
    backend = FakeBackend()
    job.watch("all", [0, 1, 2], backend, FakeStreamTask())
    job.others[1].leave()
    eventually(lambda: job.control.has_left(1))
    assert not backend.is_aborted.wait(0.3)
    job.watchdog.check("all", DOING)


def test_call_that_waits_is_reported_and_one_that_is_complete_is_not(
    alone: tuple[NcclWatchdog, FakeControl],
) -> None:
    watchdog, _ = alone
    waiting, complete = FakeCallLog(), FakeCallLog()
    for name, calls, task in (("complete", complete, FakeStreamTask()), ("waiting", waiting, FakeStreamTask(running))):
        watchdog.watch(name, [0, 1], FakeBackend(), cast(CallLog, calls), TIMEOUT_S)
        watchdog.note(name, 1, DOING, task)
    assert waiting.reports == 0
    eventually(lambda: waiting.reports)
    assert complete.reports == 0


def test_call_that_is_complete_is_not_asked_again(alone: tuple[NcclWatchdog, FakeControl]) -> None:
    """Asking an event from another thread makes the capture of a CUDA graph fail."""
    watchdog, _ = alone
    asked, turns = itertools.count(), itertools.count()
    watchdog.watch("complete", [0, 1], FakeBackend(), cast(CallLog, FakeCallLog()), TIMEOUT_S)
    watchdog.watch("waiting", [0, 1], FakeBackend(), cast(CallLog, FakeCallLog()), TIMEOUT_S)
    watchdog.note("complete", 1, DOING, FakeStreamTask(lambda: next(asked) >= 0))
    watchdog.note("waiting", 1, DOING, FakeStreamTask(lambda: next(turns) < 0))
    eventually(lambda: next(turns) > 8)
    assert next(asked) == 1


def test_coordinator_is_told_of_a_call_that_waits_whatever_its_number(job: WatchedJob) -> None:
    """NCCL itself would wait for ever for a rank that makes another call."""
    calls = job.watch("all", [0, 1, 2], FakeBackend())
    for _ in range(20):
        calls.add(SUM, None)
    before = job.control.sent
    job.watchdog.note("all", 20, DOING, FakeStreamTask(running))
    eventually(lambda: job.control.sent > before)


def test_late_member_is_found_after_the_timeout(alone: tuple[NcclWatchdog, FakeControl]) -> None:
    watchdog, control = alone
    control.verdict = PeerLost(f"rank 1 on b was lost in {DOING}: it did not come for 0.1 s", 1)
    backend = FakeBackend()
    watchdog.watch("pair", [0, 1], backend, cast(CallLog, FakeCallLog()), 0.1)
    watchdog.note("pair", 7, DOING, FakeStreamTask(running))
    assert backend.is_aborted.wait(5)
    assert error_of(watchdog, "pair") is control.verdict
    assert control.complaints == [("pair/launched", 7, (0, 1), DOING, 0.1)]


def test_call_to_which_all_have_come_and_that_does_not_end_blames_the_network(
    alone: tuple[NcclWatchdog, FakeControl],
) -> None:
    watchdog, _ = alone
    backend = FakeBackend()
    watchdog.watch("pair", [0, 1], backend, cast(CallLog, FakeCallLog()), 0.1)
    watchdog.note("pair", 1, DOING, FakeStreamTask(running))
    assert backend.is_aborted.wait(5)
    error = error_of(watchdog, "pair")
    assert type(error) is WorldError
    assert "although every rank has come; check the network between the hosts" in str(error)
    assert DOING in str(error)


def test_call_that_ends_in_time_is_no_error(alone: tuple[NcclWatchdog, FakeControl]) -> None:
    watchdog, control = alone
    backend = FakeBackend()
    watchdog.watch("pair", [0, 1], backend, cast(CallLog, FakeCallLog()), 0.05)
    watchdog.note("pair", 1, DOING, FakeStreamTask())
    assert not backend.is_aborted.wait(0.2)
    watchdog.check("pair", DOING)
    assert control.complaints == []


def test_forgotten_group_is_not_watched(job: WatchedJob) -> None:
    forgotten, kept = FakeBackend(), FakeBackend()
    job.watch("forgotten", [0, 1, 2], forgotten, FakeStreamTask(running))
    job.watch("kept", [0, 1, 2], kept, FakeStreamTask(running))
    job.watchdog.forget("forgotten")
    job.watchdog.forget("unknown")
    job.others[1].vanish()
    assert kept.is_aborted.wait(5)
    job.watchdog.abort_all()
    assert forgotten.aborts == 0


def test_failure_to_look_at_one_group_does_not_stop_the_others(
    job: WatchedJob, caplog: pytest.LogCaptureFixture
) -> None:
    def is_done() -> NoReturn:
        raise ValueError("a bug")

    backend = FakeBackend()
    with caplog.at_level(logging.ERROR, "mimatrix.comm.nccl_watchdog"):
        job.watch("odd", [0, 1], FakeBackend(), FakeStreamTask(is_done))
        job.watch("all", [0, 1, 2], backend, FakeStreamTask(running))
        eventually(lambda: caplog.records)
        job.others[2].vanish()
        assert backend.is_aborted.wait(5)
    assert "the watchdog of group odd failed" in caplog.text
