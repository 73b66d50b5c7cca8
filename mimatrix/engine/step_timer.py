"""Where the time of a step goes: computing, moving data, waiting for others, waiting for samples."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import torch

from mimatrix.comm.group import Group
from mimatrix.comm.work import Work


@dataclass(frozen=True, slots=True)
class StepStats:
    """One step on this rank."""

    step: int
    samples: int
    """Of this rank."""
    seconds: float
    compute_s: float
    communication_s: float
    """Moving data while nothing was computed."""
    waiting_s: float
    """For ranks that had not come yet, while nothing was computed. Who waits least is slowest."""
    data_s: float
    """For the loader."""
    moved_bytes: Mapping[str, int]
    """Sizes of the tensors of all collectives, by collective."""
    memory_bytes: Mapping[str, int]
    """What the engine and the optimizer hold, by kind."""


@dataclass
class StepTimer:
    """Counts the time of one step."""

    groups: tuple[Group, ...] = ()
    memory: Callable[[], Mapping[str, int]] = dict
    device: torch.device = field(default_factory=partial(torch.device, "cpu"))
    is_aside: bool = False
    """Something is done that is no part of a step."""
    _started: float = field(default_factory=time.perf_counter)
    _exposed: float = 0.0
    _data: float = 0.0
    _waited: float = 0.0
    _moved: Counter[str] = field(default_factory=Counter)
    _begun: torch.cuda.Event | None = None
    _ran: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)
    _busy: float | None = None
    _inside: float = 0.0
    """Waited for others inside of micro-steps."""
    _before: float = 0.0

    def begin_micro(self) -> None:
        """A micro-batch is there, and its computation begins."""
        # A GPU computes behind the back of the process: only its own clock can tell for how long.
        if self.device.type == "cuda" and self.groups:
            self._begun = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            self._begun.record()
            self._before = self._exposed

    def end_micro(self) -> None:
        """Its backward pass is done, or at least asked for."""
        if self._begun:
            ended = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            ended.record()
            self._ran.append((self._begun, ended))
            self._inside += self._exposed - self._before
            self._begun = None

    def busy_s(self) -> float:
        """How long this rank has worked in this step so far, on samples and for them; waiting for others excluded.

        Called when gradients are reduced, so that a GPU has nothing left to do.
        """
        if not self._ran:
            return time.perf_counter() - self._started - self._exposed
        self._ran[-1][1].synchronize()
        ran = sum(begun.elapsed_time(ended) for begun, ended in self._ran) / 1e3
        self._busy = max(0.0, ran - self._inside)
        return self._busy + self._data

    def waits(self, work: Work) -> None:
        """Wait for a collective; what that takes was not hidden behind computing."""
        if work.is_done():
            work.wait()
            return
        started = time.perf_counter()
        work.wait()
        self._exposed += time.perf_counter() - started

    @contextmanager
    def apart(self) -> Iterator[None]:
        """For small collectives that are waited for at once."""
        started = time.perf_counter()
        yield
        self._exposed += time.perf_counter() - started

    @contextmanager
    def data(self) -> Iterator[None]:
        """While the loader is waited for."""
        started = time.perf_counter()
        yield
        self._data += time.perf_counter() - started

    def restart(self) -> None:
        """Count from now on."""
        self.step(0, 0)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """For what is no part of any step."""
        started, exposed, data = time.perf_counter(), self._exposed, self._data
        waited, moved = self._totals()
        self.is_aside = True
        try:
            yield
        finally:
            self.is_aside = False
        waited_now, moved_now = self._totals()
        self._started += time.perf_counter() - started
        self._exposed, self._data = exposed, data
        self._waited, self._moved = self._waited + waited_now - waited, self._moved + (moved_now - moved)

    def _totals(self) -> tuple[float, Counter[str]]:
        waited = sum(group.sync.waited_s for group in self.groups)
        return waited, sum((group.bytes_moved for group in self.groups), Counter[str]())

    def step(self, number: int, samples: int) -> StepStats:
        """The step has ended: its figures, and counting begins anew."""
        now = time.perf_counter()
        waited, moved = self._totals()
        # Waiting happens on the thread that runs collectives; of it only what was not hidden counts here.
        seconds = now - self._started
        if self._busy is not None:
            # The process waited for its own GPU, which is not waiting for others.
            self._exposed = max(0.0, seconds - self._busy - self._data)
        waiting = min(self._exposed, waited - self._waited)
        found = StepStats(
            number,
            samples,
            seconds,
            max(0.0, seconds - self._exposed - self._data),
            self._exposed - waiting,
            waiting,
            self._data,
            dict(moved - self._moved),
            dict(self.memory()),
        )
        self._started, self._exposed, self._data = now, 0.0, 0.0
        self._waited, self._moved = waited, moved
        self._ran.clear()
        self._busy, self._inside = None, 0.0
        return found
