"""Handles of collectives: those that the host waits for, and those that a GPU puts in order after their launch."""

import threading
from typing import NoReturn

import pytest
import torch
from support.fake_nccl import FakeStreamTask

from mimatrix.comm.work import CollectiveThread, StreamWork, TorchWork, Work
from mimatrix.core.errors import PeerLost, WorldError


def watch_nothing() -> None:
    pass


def fail() -> NoReturn:
    raise ValueError("no more")


def lose_rank() -> None:
    raise PeerLost("rank 1 on b was lost", 1)


def test_stream_work_is_launched_on_the_calling_thread() -> None:
    threads: list[int] = []

    def launch() -> FakeStreamTask:
        threads.append(threading.get_ident())
        return FakeStreamTask()

    work = StreamWork(launch, watch_nothing)
    assert work.launched is None
    work.run()
    assert threads == [threading.get_ident()]


def test_wait_of_stream_work_has_the_stream_wait_and_not_the_host() -> None:
    task = FakeStreamTask(is_done=lambda: False)
    work = StreamWork(lambda: task, lose_rank)
    work.run()
    assert task.waits == 0
    work.wait()
    work.wait()
    assert task.waits == 2, "each time the stream that is current then"
    assert not work.is_done()


def test_stream_work_is_done_when_the_gpu_is() -> None:
    is_done = False
    work = StreamWork.of(FakeStreamTask(is_done=lambda: is_done))
    assert not work.is_done()
    is_done = True
    assert work.is_done()


def test_wait_of_stream_work_raises_the_error_of_its_launch_each_time() -> None:
    work = StreamWork(fail, watch_nothing)
    work.run()
    for _ in range(2):
        with pytest.raises(ValueError, match="no more"):
            work.wait()
    assert work.launched is None
    assert work.is_done()


def test_stream_work_of_what_was_launched_waits_for_it() -> None:
    task = FakeStreamTask()
    work = StreamWork.of(task)
    work.wait()
    assert work.launched is task
    assert task.waits == 1


def test_stream_work_calls_back_once_it_is_launched() -> None:
    called: list[Work] = []
    work = StreamWork(lambda: FakeStreamTask(is_done=lambda: False), watch_nothing)
    work.then(called.append)
    assert called == []
    work.run()
    work.then(called.append)
    assert called == [work, work]


def test_torch_sees_the_future_of_what_was_launched() -> None:
    task, tensor = FakeStreamTask(is_done=lambda: False), torch.ones(2)
    work = TorchWork(StreamWork.of(task), [tensor])
    assert work.get_future() is task.future
    assert not work.is_completed()
    assert work.wait()
    assert task.waits == 1
    assert work.result() == [tensor]


def test_torch_sees_the_error_of_a_launch_in_the_future() -> None:
    failed = StreamWork(fail, watch_nothing)
    failed.run()
    work = TorchWork(failed, [torch.ones(2)])
    with pytest.raises(RuntimeError, match="ValueError: no more"):
        work.get_future().wait()
    assert work.is_completed()
    assert not work.is_success()
    assert isinstance(work.exception(), ValueError)


def test_work_is_done_when_its_task_has_ended_on_the_thread() -> None:
    may_end, thread = threading.Event(), CollectiveThread().start()
    work = Work(lambda: _wait_for(may_end), watch_nothing)
    thread.submit(work)
    assert not work.is_done()
    with pytest.raises(WorldError, match=r"not complete after 0\.01 s; it still runs, so wait again"):
        work.wait(0.01)
    may_end.set()
    work.wait(10)
    assert work.is_done()
    thread.close()


def test_wait_of_work_raises_when_a_rank_is_lost_meanwhile() -> None:
    work = Work(watch_nothing, lose_rank)
    with pytest.raises(PeerLost, match="rank 1 on b"):
        work.wait()


def test_wait_of_work_raises_the_error_of_its_task() -> None:
    work = Work(fail, watch_nothing)
    work.run()
    with pytest.raises(ValueError, match="no more"):
        work.wait()


def _wait_for(event: threading.Event) -> None:
    event.wait(10)
