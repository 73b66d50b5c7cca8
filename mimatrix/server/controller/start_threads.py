"""Threads that start teams, so that a start that takes long holds up no turn of the controller."""

import errno
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from queue import SimpleQueue
from typing import Any, TypeVar

_T = TypeVar("_T")
_Task = tuple["Future[Any]", Callable[[], Any]]


class StartThreads(Executor):
    """A few threads that do not keep the process from ending, unlike those of `ThreadPoolExecutor`."""

    def __init__(self, count: int = 8) -> None:
        self._count = count
        self._threads: list[threading.Thread] = []
        self._tasks: SimpleQueue[_Task] = SimpleQueue()

    def submit(self, fn: Callable[..., _T], /, *args: Any, **kwargs: Any) -> "Future[_T]":
        """Have a function called by a thread that is free, or by the first that will be."""
        future: Future[_T] = Future()
        try:
            self._add_thread()
        except RuntimeError as error:  # no thread is left
            if not self._threads:
                future.set_exception(OSError(errno.EAGAIN, str(error)))
                return future
        self._tasks.put((future, lambda: fn(*args, **kwargs)))
        return future

    def _add_thread(self) -> None:
        if len(self._threads) < self._count:
            thread = threading.Thread(target=self._work, name=f"mimatrix-start-{len(self._threads)}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def _work(self) -> None:
        while True:
            future, call = self._tasks.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = call()
            except BaseException as error:  # noqa: BLE001 (it is raised where the result is taken)
                future.set_exception(error)
            else:
                future.set_result(result)
            del future, call  # an archive's path and a token need not be kept until the next task
