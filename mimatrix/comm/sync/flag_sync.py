"""Synchronisation in mapped memory: every rank publishes how far it has come, and waits only for those it reads from.

A rank's page holds a counter and the headers of its last calls. The counter grows by one with each round and with each
call, on all ranks alike, so that one number says which round of which call a rank has finished. That is also how a slot
is known to be free again: its readers have come past the round in which they read it.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from typing import NoReturn

from mimatrix.comm.calls import PACKED_BYTES, CallHeader, CallSignature, disagreement, offset_if_same
from mimatrix.comm.control.client import ControlClient
from mimatrix.core.errors import WorldError

PAGE_BYTES = 4096
_HEADERS = 8
_HEADER_AT, _HEADER_BYTES = 64, 64
_SPINS, _YIELDS, _LOOKS = 100, 2000, 20
_BUSY_S = 20e-6
"""Of processor time: another thread of this process computes."""
_LONGEST_SLEEP_S = 2e-4

Release = tuple[tuple[int, int, int], ...]
"""What must have happened before a slot may be written again: (peer, the count that it must have reached, the call)."""


class FlagSync:
    """The pages of one group's members, as one rank sees them. `members[i]` is the rank in the job of member i."""

    def __init__(
        self, rank: int, pages: Sequence[memoryview], members: Sequence[int], control: ControlClient, timeout_s: float
    ) -> None:
        self._rank, self._pages, self._members = rank, pages, members
        self._counts = [page[:8].cast("Q") for page in pages]
        self._control, self._timeout_s = control, timeout_s
        self._fence = threading.Lock()
        self._number, self._base, self._next = -1, 0, 1  # a page starts at zero: nothing announced
        self._call: CallSignature | None = None
        self._calls: list[tuple[int, CallSignature | None]] = [(-1, None)] * _HEADERS
        self._packed = [b""] * _HEADERS
        self._broken = ""
        self._round = 0
        self._offsets: dict[int, int] = {}
        self._unread: deque[Release] = deque()
        self.waited_s = 0.0
        """How long this rank has waited for others, all calls together."""

    def begin(self, call: CallSignature, offset: int, rounds: int) -> None:
        """The data of this call lie ready at `offset`."""
        if self._broken:
            raise WorldError(f"this group is broken: {self._broken}; make it anew")
        if len(self._unread) == _HEADERS - 1:
            # The header that is about to be overwritten may still be unread by a slow peer.
            self.wait_released(self._unread.popleft())
        self._number += 1
        self._base, self._next = self._next, self._next + rounds + 1
        self._call, self._round = call, 0
        self._calls[self._number % _HEADERS] = (self._number, call)
        self._offsets.clear()
        packed = self._packed[self._number % _HEADERS] = call.packed(self._number, offset)
        self._pages[self._rank][_header_at(self._number)] = packed
        self._publish(self._base)

    def wait(self, number: int, peers: Collection[int]) -> None:
        """Until each of `peers` has finished the rounds before `number`."""
        self._round = number
        for peer in peers:
            if self._counts[peer][0] < self._base + number:
                self._wait(peer, self._base + number)
            if peer not in self._offsets:
                self._offsets[peer] = self._checked(peer)

    def offset_of(self, peer: int) -> int:
        """Where a peer that was waited for has its data of this call."""
        return self._offsets[peer]

    def finish(self, number: int) -> None:
        """Say that this rank has done its round `number`: what it wrote may be read."""
        self._publish(self._base + number + 1)

    def end(self, readers: Sequence[tuple[int, int]]) -> Release:
        """When the data of this call may be overwritten; `readers` are peers and the last round in which they read."""
        release = tuple((peer, self._base + number + 1, self._number) for peer, number in readers)
        self._unread.append(release)
        return release

    def fail(self, error: BaseException) -> None:
        """Say that this rank cannot go on in the middle of a call; it makes no further one in this group."""
        self._broken = f"{self._call} ended with {type(error).__name__}: {error}"
        self._control.report_failure(self._members, f"{self._call}, round {self._round}", error)

    def wait_released(self, release: Release) -> None:
        """Until all its readers have let go."""
        for peer, count, number in release:
            if self._counts[peer][0] < count:
                self._wait(peer, count)
            # One that is only read from, as the root of a broadcast, looks at what its readers asked for here.
            self._compare(peer, number)

    def _publish(self, count: int) -> None:
        # Taking a lock is a memory barrier: what was written before it is seen before the count.
        with self._fence:
            self._counts[self._rank][0] = count

    def _wait(self, peer: int, count: int) -> None:
        """Spin a little, then let others run, then sleep: ranks may outnumber cores."""
        started = time.perf_counter()
        if not self._soon(self._counts[peer], count):
            self._sleep(peer, count)
        self.waited_s += time.perf_counter() - started

    def _soon(self, counts: memoryview, count: int) -> bool:
        for _ in range(_SPINS):
            if counts[0] >= count:
                return True
        before = _others_s()
        for number in range(1, _YIELDS + 1):
            os.sched_yield()
            if counts[0] >= count:
                return True
            if number % _LOOKS == 0 and _others_s() - before > _BUSY_S:
                return False
        return False

    def _sleep(self, peer: int, count: int) -> None:
        counts, started = self._counts[peer], time.monotonic()
        doing = f"{self._call}, call number {self._number}, round {self._round}, since {time.strftime('%H:%M:%S')}"
        self._control.begin_waiting(self._members[peer], self._call, self._round)
        pause = 20e-6
        while True:
            trouble = self._control.failure(self._members[peer], self._members, doing)
            if counts[0] >= count:
                break
            if trouble:
                raise trouble
            waited = time.monotonic() - started
            if waited > self._timeout_s:
                self._control.report_timeout(self._members[peer], self._members, doing, waited)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_SLEEP_S)
        self._control.end_waiting()

    def _checked(self, peer: int) -> int:
        """Where a peer's data of this call lie, if it asks for the same."""
        offset = offset_if_same(self._packed[self._number % _HEADERS], self._raw_header(peer, self._number))
        if offset is not None:
            return offset
        found = self._header(peer, self._number)
        if found.number != self._number:
            self._disagree(peer, self._number, found)
        self._compare(peer, self._number)
        return found.offset

    def _compare(self, peer: int, number: int) -> None:
        """Raise if a peer asked for something else in that call; where its header is gone, it was read before."""
        if offset_if_same(self._packed[number % _HEADERS], self._raw_header(peer, number)) is not None:
            return
        known, call = self._calls[number % _HEADERS]
        found = self._header(peer, number)
        if known == number == found.number and call and not found.agrees(call):
            self._disagree(peer, number, found)

    def _header(self, peer: int, number: int) -> CallHeader:
        return CallHeader.unpack(self._raw_header(peer, number))

    def _raw_header(self, peer: int, number: int) -> bytes:
        return bytes(self._pages[peer][_header_at(number)])

    def _disagree(self, peer: int, number: int, found: CallHeader) -> NoReturn:
        call = self._calls[number % _HEADERS][1]
        assert call
        ranks = self._members[self._rank], self._members[peer]
        mine, theirs = map(self._control.name, ranks)
        self._control.report_mismatch(disagreement(number, mine, call, theirs, found), ranks)


def _header_at(number: int) -> slice:
    """Where the header of a call is in a page."""
    start = _HEADER_AT + _HEADER_BYTES * (number % _HEADERS)
    return slice(start, start + PACKED_BYTES)


def _others_s() -> float:
    """Processor time of this process's other threads. One that waits must not take it from one that computes."""
    return time.process_time() - time.thread_time()
