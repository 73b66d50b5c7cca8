"""The executor on windows that are not mapped: reads several at a time into the own arena, then adds."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from mimatrix.comm.calls import CallSignature
from mimatrix.comm.control.client import ControlClient
from mimatrix.comm.execution.one_sided import OneSidedExecutor, Sync
from mimatrix.comm.execution.program import ProgramStep, Read
from mimatrix.comm.execution.reduce import reduce_into
from mimatrix.comm.memory.arena import Arena, Slot
from mimatrix.core.errors import PeerLost, WorldError

_IN_FLIGHT = 8


class RemoteReadWork(Protocol):
    """A read under way."""

    def wait(self, deadline: float | None = None) -> None:
        """Until it is done; `deadline` is a moment of time.monotonic."""
        ...


class RemoteWindow(Protocol):
    """A peer's window whose bytes have to be fetched."""

    def start_read(self, start: int, stop: int, into: torch.Tensor) -> RemoteReadWork:
        """Begin to fetch bytes [start, stop)."""
        ...


@dataclass(frozen=True, slots=True)
class _Read:
    """What to fetch for one take from one peer, and where to."""

    take: Read
    peer: int
    into: torch.Tensor


class RemoteReadExecutor(OneSidedExecutor):
    """Runs programs where peers' memory is behind a network."""

    sees_peers = False

    def __init__(
        self,
        arena: Arena,
        windows: Sequence[RemoteWindow | None],
        sync: Sync,
        members: Sequence[int],
        control: ControlClient,
        timeout_s: float,
    ) -> None:
        super().__init__(arena, [None] * len(windows), sync)
        self._far, self._members, self._control, self._timeout_s = windows, members, control, timeout_s
        self._scratch: Slot | None = None

    def _step(self, step: ProgramStep, call: CallSignature, offset: int) -> None:
        flying: deque[tuple[_Read, RemoteReadWork]] = deque()
        addends: dict[Read, list[torch.Tensor]] = {}
        for read in self._reads(step, call, offset):
            if len(flying) == _IN_FLIGHT:
                self._land(*flying.popleft(), call, offset, addends)
            flying.append((read, self._start(read, call)))
        while flying:
            self._land(*flying.popleft(), call, offset, addends)

    def _reads(self, step: ProgramStep, call: CallSignature, offset: int) -> Iterator[_Read]:
        """In the order of the schedule: copies straight to their place, addends side by side into scratch memory."""
        size, at = call.dtype.itemsize, 0
        room = self._room(sum((take.stop - take.start) * len(take.sources) for take in step.takes if take.adds) * size)
        for take in step.takes:
            length = (take.stop - take.start) * size
            for peer in take.sources:
                if take.adds:
                    yield _Read(take, peer, room[at : at + length])
                    at += length
                else:
                    place = offset + take.start * size
                    yield _Read(take, peer, self._arena.window.bytes[place : place + length])

    def _start(self, read: _Read, call: CallSignature) -> RemoteReadWork:
        window, size = self._far[read.peer], call.dtype.itemsize
        assert window
        there = self.sync.offset_of(read.peer)
        try:
            return window.start_read(there + read.take.start * size, there + read.take.stop * size, read.into)
        except WorldError as error:
            self._lost(read.peer, call, error)
            raise

    def _land(
        self,
        read: _Read,
        reading: RemoteReadWork,
        call: CallSignature,
        offset: int,
        addends: dict[Read, list[torch.Tensor]],
    ) -> None:
        """Wait for a read; when it was the last of a sum, add."""
        self._control.begin_waiting(self._members[read.peer], call, 0)
        try:
            reading.wait(time.monotonic() + self._timeout_s)
        except WorldError as error:
            self._lost(read.peer, call, error)
            raise
        self._control.end_waiting()
        if not read.take.adds:
            return
        have = addends.setdefault(read.take, [])
        have.append(read.into.view(call.dtype))
        if len(have) == len(read.take.sources):
            size = call.dtype.itemsize
            target = self._view(-1, offset + read.take.start * size, offset + read.take.stop * size, call.dtype)
            reduce_into(target, have, call.op, self._divisor(read.take, call))

    def _lost(self, peer: int, call: CallSignature, error: WorldError) -> None:
        """The transport knows no ranks: say which one it was."""
        if not isinstance(error, PeerLost):
            self._control.report_timeout(self._members[peer], self._members, f"{call} ({error})", self._timeout_s)

    def _room(self, size: int) -> torch.Tensor:
        """Registered memory for addends; grows with what is asked for."""
        if self._scratch is None or self._scratch.size < size:
            if self._scratch:
                self._scratch.free()
            self._scratch = self._arena.allocate(size)
        return self._scratch.bytes
