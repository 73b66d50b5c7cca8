"""The executor on windows that are not mapped: several reads in flight into the own arena, then reductions."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from mimatrix.comm.calls import CallSignature
from mimatrix.comm.control.client import ControlClient
from mimatrix.comm.execution.one_sided import OneSidedExecutor
from mimatrix.comm.execution.program import ProgramStep, Read
from mimatrix.comm.execution.reduce import reduce_into
from mimatrix.comm.memory.arena import Arena, Slot
from mimatrix.comm.sync import Sync
from mimatrix.core.errors import PeerLost, WorldError

_MAX_IN_FLIGHT = 8


class RemoteReadWork(Protocol):
    """A read in flight."""

    def wait(self, deadline: float | None = None) -> None:
        """Wait until the bytes are there; `deadline` is a time of the monotonic clock."""
        ...


class RemoteWindow(Protocol):
    """A peer's window whose bytes are copied over a network."""

    def start_read(self, start: int, stop: int, into: torch.Tensor) -> RemoteReadWork:
        """Start to copy bytes [start, stop) into a tensor."""
        ...


@dataclass(frozen=True, slots=True)
class _PeerRead:
    """The part of a `Read` that comes from one peer, and where it goes."""

    read: Read
    peer: int
    into: torch.Tensor


class RemoteReadExecutor(OneSidedExecutor):
    """Runs programs for one rank whose peers are on other hosts."""

    maps_peers = False

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
        self._windows, self._members, self._control, self._timeout_s = windows, members, control, timeout_s
        self._scratch: Slot | None = None

    def _step(self, step: ProgramStep, call: CallSignature, offset: int) -> None:
        in_flight: deque[tuple[_PeerRead, RemoteReadWork]] = deque()
        addends: dict[Read, list[torch.Tensor]] = {}
        for peer_read in self._peer_reads(step, call, offset):
            if len(in_flight) == _MAX_IN_FLIGHT:
                self._finish(*in_flight.popleft(), call, offset, addends)
            in_flight.append((peer_read, self._start(peer_read, call)))
        while in_flight:
            self._finish(*in_flight.popleft(), call, offset, addends)

    def _peer_reads(self, step: ProgramStep, call: CallSignature, offset: int) -> Iterator[_PeerRead]:
        """Yield the reads in the schedule's order: copies go to their place, addends into scratch memory."""
        size, at = call.dtype.itemsize, 0
        needed = sum((read.stop - read.start) * len(read.sources) for read in step.reads if read.adds) * size
        scratch = self._scratch_bytes(needed)
        for read in step.reads:
            length = (read.stop - read.start) * size
            for peer in read.sources:
                if read.adds:
                    yield _PeerRead(read, peer, scratch[at : at + length])
                    at += length
                else:
                    start = offset + read.start * size
                    yield _PeerRead(read, peer, self._arena.window.bytes[start : start + length])

    def _start(self, peer_read: _PeerRead, call: CallSignature) -> RemoteReadWork:
        window, size = self._windows[peer_read.peer], call.dtype.itemsize
        assert window
        read, offset = peer_read.read, self.sync.offset_of(peer_read.peer)
        try:
            return window.start_read(offset + read.start * size, offset + read.stop * size, peer_read.into)
        except WorldError as error:
            self._raise_lost(peer_read.peer, call, error)
            raise

    def _finish(
        self,
        peer_read: _PeerRead,
        work: RemoteReadWork,
        call: CallSignature,
        offset: int,
        addends: dict[Read, list[torch.Tensor]],
    ) -> None:
        """Wait for a read; if it was the last of a sum, add up."""
        read = peer_read.read
        self._control.begin_waiting(self._members[peer_read.peer], call, 0)
        try:
            work.wait(time.monotonic() + self._timeout_s)
        except WorldError as error:
            self._raise_lost(peer_read.peer, call, error)
            raise
        self._control.end_waiting()
        if not read.adds:
            return
        arrived = addends.setdefault(read, [])
        arrived.append(peer_read.into.view(call.dtype))
        if len(arrived) == len(read.sources):
            reduce_into(self._target(read, call, offset), arrived, call.reduce_op, self._divisor(read, call))

    def _raise_lost(self, peer: int, call: CallSignature, error: WorldError) -> None:
        """Raise an error that names the lost rank, which the transport does not know."""
        if not isinstance(error, PeerLost):
            self._control.report_timeout(self._members[peer], self._members, f"{call} ({error})", self._timeout_s)

    def _scratch_bytes(self, size: int) -> torch.Tensor:
        """Return registered memory for addends, which grows with what is needed."""
        if self._scratch is None or self._scratch.size < size:
            if self._scratch:
                self._scratch.free()
            self._scratch = self._arena.allocate(size)
        return self._scratch.bytes
