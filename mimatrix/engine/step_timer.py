"""Where the time of a step goes: computing, moving data, waiting for others, waiting for samples."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch

from mimatrix.comm.group import Group
from mimatrix.comm.work import StreamWork, Work


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """Where the time of one step went, on this rank."""

    step: int
    samples: int
    """Samples of this rank."""
    seconds: float
    compute_s: float
    communication_s: float
    """Moving data while nothing was computed."""
    waiting_s: float
    """Waiting for ranks that had not come yet, while nothing was computed. The rank that waits least is slowest."""
    data_s: float
    """Waiting for the loader."""
    moved_bytes: Mapping[str, int]
    """Sizes of the tensors of all collectives, by collective."""
    memory_bytes: Mapping[str, int]
    """Memory that the engine and the optimizer hold, by kind."""


@dataclass
class StepTimer:
    """Measures one step after the other."""

    groups: tuple[Group, ...] = ()
    device: torch.device = field(default_factory=partial(torch.device, "cpu"))
    is_excluded: bool = False
    """Whether something is being done that is not part of a step."""
    _started: float = field(default_factory=time.perf_counter)
    _exposed: float = 0.0
    _data: float = 0.0
    _waited: float = 0.0
    _moved: Counter[str] = field(default_factory=Counter)
    _micro_begun: torch.cuda.Event | None = None
    _micro_steps: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    _busy: float | None = None
    _exposed_in_micro: float = 0.0
    """Waited for other ranks inside micro-steps."""
    _stream_waits: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    """Where the GPU's stream, not the host, waited for a collective inside a micro-step: before it and after it."""
    _exposed_before: float = 0.0
    _behind: float = 0.0
    """How much longer than this rank the slowest one has worked in this step, where that is known."""

    def add_group(self, group: Group) -> None:
        """Count the collectives of one more group."""
        self.groups = (*self.groups, group)

    def begin_micro_step(self) -> None:
        """Begin the computation of a micro-batch."""
        # A GPU computes asynchronously: only its own clock can tell for how long.
        if self.device.type == "cuda" and self.groups:
            self._micro_begun = self._record_event()
            self._exposed_before = self._exposed

    def end_micro_step(self) -> None:
        """End it: its backward pass is done, or at least enqueued."""
        if self._micro_begun:
            self._micro_steps.append((self._micro_begun, self._record_event()))
            self._exposed_in_micro += self._exposed - self._exposed_before
            self._micro_begun = None

    def busy_s(self) -> float:
        """Return how long this rank has worked in this step so far, loading included, waiting for others excluded.

        Called when gradients are reduced, so that a GPU has nothing left to do.
        """
        if not self._micro_steps:
            return time.perf_counter() - self._started - self._exposed
        self._micro_steps[-1][1].synchronize()
        computed, waited = (
            sum(begun.elapsed_time(ended) for begun, ended in events) / 1e3
            for events in (self._micro_steps, self._stream_waits)
        )
        self._busy = max(0.0, computed - waited - self._exposed_in_micro)
        return self._busy + self._data

    def busy_s_if_known(self) -> float | None:
        """Return `busy_s` where ranks need it to tell how long they wait: between hosts, and not of a GPU.

        Ranks of one host see in their memory who has come; to ask a GPU would be to wait for it.
        """
        spans_hosts = any(not group.maps_peers for group in self.groups)
        return self.busy_s() if spans_hosts and self.device.type != "cuda" else None

    def note_busy(self, busy_s: Sequence[float | None], rank: int) -> None:
        """Note how long each rank has worked in this step; `rank` is this one, which waits for the slowest."""
        own = busy_s[rank]
        if own is not None:
            self._behind = max(seconds for seconds in busy_s if seconds is not None) - own

    def wait(self, work: Work) -> None:
        """Wait for a collective; the time it takes was not hidden behind computation."""
        if isinstance(work, StreamWork):
            self._wait_on_stream(work)
            return
        if work.is_done():
            work.wait()
            return
        started = time.perf_counter()
        work.wait()
        self._exposed += time.perf_counter() - started

    def _wait_on_stream(self, work: StreamWork) -> None:
        """Have the stream wait, and note how long, if it does so between computations."""
        begun = self._record_event() if self._micro_begun else None
        work.wait()
        if begun:
            self._stream_waits.append((begun, self._record_event()))

    def _record_event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    @contextmanager
    def exposed(self) -> Iterator[None]:
        """Count the body as communication that was not hidden: small collectives that are waited for at once."""
        started = time.perf_counter()
        yield
        self._exposed += time.perf_counter() - started

    @contextmanager
    def data_wait(self) -> Iterator[None]:
        """Count the body as waiting for the loader."""
        started = time.perf_counter()
        yield
        self._data += time.perf_counter() - started

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Count the body as part of no step."""
        started, exposed, data = time.perf_counter(), self._exposed, self._data
        waited, moved = self._totals()
        self.is_excluded = True
        try:
            yield
        finally:
            self.is_excluded = False
        waited_now, moved_now = self._totals()
        self._started += time.perf_counter() - started
        self._exposed, self._data = exposed, data
        self._waited, self._moved = self._waited + waited_now - waited, self._moved + (moved_now - moved)

    def restart(self) -> None:
        """Begin a step now."""
        self.end_step(0, 0, {})

    def end_step(self, step: int, samples: int, memory_bytes: Mapping[str, int]) -> StepStats:
        """End the step and begin the next; return its figures."""
        now = time.perf_counter()
        waited, moved = self._totals()
        # Waiting happens on the thread that runs collectives; of it only what was not hidden counts here.
        seconds = now - self._started
        if self._busy is not None:
            # The process waited for its own GPU, which is not waiting for others.
            self._exposed = max(0.0, seconds - self._busy - self._data)
        # Between hosts, collectives do not tell waiting for a rank from waiting for its data.
        waiting = min(self._exposed, max(self._behind, waited - self._waited))
        stats = StepStats(
            step=step,
            samples=samples,
            seconds=seconds,
            compute_s=max(0.0, seconds - self._exposed - self._data),
            communication_s=self._exposed - waiting,
            waiting_s=waiting,
            data_s=self._data,
            moved_bytes=dict(moved - self._moved),
            memory_bytes=dict(memory_bytes),
        )
        self._started, self._exposed, self._data = now, 0.0, 0.0
        self._waited, self._moved = waited, moved
        self._micro_steps.clear()
        self._stream_waits.clear()
        self._busy, self._exposed_in_micro, self._behind = None, 0.0, 0.0
        return stats

    def _totals(self) -> tuple[float, Counter[str]]:
        waited = sum(group.sync.waited_s for group in self.groups)
        return waited, sum((group.bytes_moved for group in self.groups), Counter[str]())
