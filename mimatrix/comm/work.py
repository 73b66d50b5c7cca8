# mypy: disable-error-code="override,misc,name-defined"
# torch's stubs of Work leave no room for subclasses in Python.
"""Collectives that run while the caller computes: a thread that takes them in order, and a handle for each."""

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import lru_cache
from typing import Any, Protocol

import torch
import torch.distributed as dist

from mimatrix.core.errors import UserError, WorldError

_POLL_S = 0.05
Task = Callable[[], None]


class Work:
    """A collective that was submitted; `watch` raises if a rank that it needs was lost."""

    def __init__(self, task: Task, watch: Task) -> None:
        self._task: Task | None = task
        self._watch = watch
        self._done, self._lock = threading.Event(), threading.Lock()
        self._callbacks: list[Callable[[Work], None]] = []
        self.error: Exception | None = None

    def run(self) -> None:
        """Run the task and store its error for `wait`."""
        assert self._task
        try:
            with torch.no_grad():  # parameters may be reduced too
                self._task()
        except Exception as error:  # noqa: BLE001 (raised by `wait`)
            self.error = error
        self._task = None
        with self._lock:
            self._done.set()
        for callback in self._callbacks:
            callback(self)

    def then(self, callback: Callable[["Work"], None]) -> None:
        """Call `callback` on the thread that completes the work, or at once if it is complete already."""
        with self._lock:
            if not self._done.is_set():
                self._callbacks.append(callback)
                return
        callback(self)

    def is_done(self) -> bool:
        """Return whether the work has ended, with or without an error."""
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until the work is complete, and raise its error if it has one.

        A collective's own waits have deadlines. c10d collectives cannot be interrupted, so this also checks whether
        a rank was lost meanwhile.
        """
        left_s = timeout_s if timeout_s is not None else float("inf")
        while not self._done.wait(min(left_s, _POLL_S)):
            self._watch()
            left_s -= _POLL_S
            if left_s <= 0:
                raise WorldError(f"a collective is not complete after {timeout_s} s; it still runs, so wait again")
        if self.error:
            raise self.error


class StreamWork(Work):
    """A collective that a GPU puts in order: done for the host once it is launched; `wait` has the stream wait."""

    def __init__(self, launch: Callable[[], "StreamTask"], watch: Task) -> None:
        super().__init__(self._launch, watch)
        self._start = launch
        self.launched: StreamTask | None = None
        """What was launched, unless that failed."""

    @classmethod
    def of(cls, task: "StreamTask") -> "StreamWork":
        """Return the work of what was launched already."""
        work = cls(lambda: task, _watch_nothing)
        work.run()
        return work

    def _launch(self) -> None:
        self.launched = self._start()

    def wait(self, timeout_s: float | None = None) -> None:
        """Have the current stream wait for the collective; raise the error with which launching it ended."""
        super().wait(timeout_s)
        if self.launched:
            self.launched.wait()

    def is_done(self) -> bool:
        """Return whether the GPU has completed it, or launching it failed."""
        return self.launched is None or self.launched.is_completed()


class StreamTask(Protocol):
    """What runs on a GPU after its launch: c10d's `Work` of NCCL, or a `SideStreamTask`."""

    def wait(self) -> Any:
        """Have the current stream wait for it."""
        ...

    def is_completed(self) -> bool:
        """Return whether the GPU has completed it."""
        ...

    def get_future(self) -> "torch.futures.Future[Any]":
        """Return a future that is complete when it is launched, and has streams wait that use its result."""
        ...


class SideStreamTask:
    """Kernels and collectives on a stream of their own, after what the caller has launched so far."""

    def __init__(self, run: Task, tensor: torch.Tensor) -> None:
        device, caller = tensor.device, torch.cuda.current_stream(tensor.device)
        stream = _launch_stream(device)
        stream.wait_stream(caller)
        self._future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future(devices=[device])
        with torch.cuda.stream(stream):
            run()
            self._event = stream.record_event()
            self._future.set_result([tensor])

    def wait(self) -> None:
        """Have the current stream wait for it."""
        torch.cuda.current_stream().wait_event(self._event)

    def is_completed(self) -> bool:
        """Return whether the GPU has completed it."""
        return bool(self._event.query())

    def get_future(self) -> "torch.futures.Future[list[torch.Tensor]]":
        """Return a future of the tensor."""
        return self._future


class CallerStreamWork(dist._Work):
    """A collective that runs on the caller's stream; made right after its launch."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        # Other devices have no streams: what was launched on them is complete.
        self._event = torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None

    @classmethod
    def unless(cls, work: dist.Work | None, tensor: torch.Tensor) -> dist.Work:
        """Return the work of a launch; c10d returns none for a collective on the caller's stream."""
        return cls(tensor.device) if work is None else work

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002 (torch's signature)
        """Have the current stream wait: it may be another one than that of the launch."""
        if self._event:
            torch.cuda.current_stream(self._device).wait_event(self._event)
        return True

    def is_completed(self) -> bool:
        """Return whether the GPU has completed it."""
        return self._event is None or bool(self._event.query())

    def is_success(self) -> bool:
        """Return whether the GPU has completed it; the watchdog tells of failures."""
        return self.is_completed()


class CollectiveThread:
    """The thread on which a rank's collectives run, in the order in which they were submitted."""

    def __init__(self) -> None:
        self._works: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._queued, self._is_closed = 0, False
        self._lock, self._running = threading.Lock(), threading.Lock()
        self._thread = threading.Thread(target=self._run, name="mimatrix-comm", daemon=True)

    def start(self) -> "CollectiveThread":
        """Start the thread and return this object."""
        self._thread.start()
        return self

    def submit(self, work: Work, *, inline: bool = False) -> None:
        """Queue `work`; with `inline` run it on the calling thread if nothing else is queued or running."""
        with self._lock:
            runs_here = inline and not self._queued and self._running.acquire(blocking=False)
            if not runs_here:
                if self._is_closed:  # nothing would ever run it
                    raise UserError("a collective was started after its group was closed; call run.close last")
                self._queued += 1
                self._works.put(work)
        if runs_here:
            try:
                work.run()
            finally:
                self._running.release()

    @property
    def is_busy(self) -> bool:
        """Whether a collective runs, or is queued."""
        return self._queued > 0 or self._running.locked()

    def close(self) -> None:
        """End the thread after the work that is queued."""
        with self._lock:
            self._is_closed = True
            self._works.put(None)
        self._thread.join(timeout=5)

    def _run(self) -> None:
        while work := self._works.get():
            with self._running:
                work.run()
            with self._lock:
                self._queued -= 1


class TorchWork(dist._Work):
    """A `Work` with the interface of `torch.distributed.Work`."""

    def __init__(self, work: Work, result: list[torch.Tensor]) -> None:
        super().__init__()
        self._work, self._result = work, result
        self._future: torch.futures.Future[list[torch.Tensor]] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the work is complete, and raise its error if it has one."""
        seconds = timeout.total_seconds() if timeout else 0.0
        self._work.wait(seconds or None)
        return True

    def is_completed(self) -> bool:
        """Return whether the work has ended."""
        return self._work.is_done()

    def is_success(self) -> bool:
        """Return whether the work has ended without an error."""
        return self._work.is_done() and self._work.error is None

    def exception(self) -> Exception | None:
        """Return the error with which the work ended."""
        return self._work.error

    def result(self) -> list[torch.Tensor]:
        """Return the output tensors."""
        return self._result

    def get_future(self) -> "torch.futures.Future[list[torch.Tensor]]":
        """Return a future of the output tensors, for callers that chain work, as DDP does."""
        if self._future is None and isinstance(self._work, StreamWork) and self._work.launched:
            self._future = self._work.launched.get_future()
        if self._future is None:
            ended: torch.futures.Future[None] = torch.futures.Future()
            # Only what a callback raises is an error for torch's own code too; `set_exception` would return the
            # exception as the result, which DDP takes for tensors.
            self._future = ended.then(self._outcome)
            self._work.then(lambda _: ended.set_result(None))
        return self._future

    def _outcome(self, _: object) -> list[torch.Tensor]:
        if self._work.error:
            raise self._work.error
        return self._result


class DiagnosedWork(dist._Work):
    """A c10d `Work` that names the lost rank when it fails; `diagnose` raises if there is one."""

    def __init__(self, work: dist.Work, diagnose: Callable[[RuntimeError], None]) -> None:
        super().__init__()
        self._work, self._diagnose = work, diagnose

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the work is complete, and raise its error if it has one."""
        try:
            return self._work.wait(timeout) if timeout else self._work.wait()
        except RuntimeError as error:
            self._diagnose(error)
            raise

    def is_completed(self) -> bool:
        """Return whether the work has ended."""
        return self._work.is_completed()

    def is_success(self) -> bool:
        """Return whether the work has ended without an error."""
        return self._work.is_success()

    def exception(self) -> Any:
        """Return the error with which the work ended."""
        return self._work.exception()

    def _source_rank(self) -> int:
        return self._work._source_rank()


def with_side_stream(task: Task, tensor: torch.Tensor) -> Task:
    """Return `task` so that on a GPU it runs after the caller's kernels so far, on a stream of its own.

    If the task runs on the calling thread, it runs on the caller's stream instead: nothing could overlap there.
    """
    if not tensor.is_cuda:
        return task
    caller = threading.get_ident()
    ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
    ready.record(torch.cuda.current_stream(tensor.device))

    def run() -> None:
        if threading.get_ident() == caller:
            task()
            return
        stream = _side_stream(tensor.device)
        stream.wait_event(ready)
        with torch.cuda.stream(stream):
            task()
            stream.synchronize()

    return run


def _watch_nothing() -> None:
    """Do nothing: the watchdog of NCCL watches what is launched."""


@lru_cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


@lru_cache
def _launch_stream(device: torch.device) -> torch.cuda.Stream:
    """Return a stream on which the host waits for nothing; what the side stream waits for must not block it."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
