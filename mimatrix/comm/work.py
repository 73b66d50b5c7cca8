"""Collectives run beside the computation: a thread that takes them in order, and a handle for each."""

import queue
import threading
from collections.abc import Callable

import torch

from mimatrix.core.errors import WorldError

_POLL_S = 0.05
Task = Callable[[], None]


class Work:
    """A collective under way."""

    def __init__(self, task: Task, watch: Task) -> None:
        self._task: Task | None = task
        self._watch = watch
        self._done, self._lock = threading.Event(), threading.Lock()
        self._then: list[Callable[[Work], None]] = []
        self.error: Exception | None = None

    def run(self) -> None:
        """Do it, and keep what goes wrong for whoever waits."""
        assert self._task
        try:
            with torch.no_grad():  # parameters may be summed too
                self._task()
        except Exception as error:  # noqa: BLE001 (it is raised where somebody waits)
            self.error = error
        self._task = None
        with self._lock:
            self._done.set()
        for callback in self._then:
            callback(self)

    def then(self, callback: Callable[["Work"], None]) -> None:
        """Call back when it is done: on the thread that does it, or here and now if it is done already."""
        with self._lock:
            if not self._done.is_set():
                self._then.append(callback)
                return
        callback(self)

    def is_done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Back when it is done; raises what went wrong.

        Its own waits have deadlines; and since a native collective cannot be interrupted, whoever waits here also looks
        whether a rank was lost meanwhile.
        """
        left = timeout_s if timeout_s is not None else float("inf")
        while not self._done.wait(min(left, _POLL_S)):
            self._watch()
            left -= _POLL_S
            if left <= 0:
                raise WorldError(f"a collective is not done after {timeout_s} s; it goes on, wait for it again")
        if self.error:
            raise self.error


class CollectiveThread:
    """The thread on which collectives run while the caller computes."""

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._waiting = 0
        self._lock, self._turn = threading.Lock(), threading.Lock()
        self._thread = threading.Thread(target=self._run, name="mimatrix-comm", daemon=True)
        self._thread.start()

    def submit(self, work: Work, *, inline: bool = False) -> None:
        """Run after all that were submitted before; at once and here if asked for and nothing is under way."""
        with self._lock:
            here = inline and not self._waiting and self._turn.acquire(blocking=False)
            if not here:
                self._waiting += 1
                self._works.put(work)
        if here:
            try:
                work.run()
            finally:
                self._turn.release()

    def close(self) -> None:
        """Let the thread end after what is under way."""
        self._works.put(None)
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while work := self._works.get():
            with self._turn:
                work.run()
            with self._lock:
                self._waiting -= 1
