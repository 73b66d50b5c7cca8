"""Synchronisation in mapped memory: every rank publishes its progress, and waits only for those it reads from.

A rank's page holds a counter and the headers of its last calls. The counter grows by one with each round and each call,
on all ranks alike, so one number says which round of which call a rank has finished. It also tells when a slot is free
again: once its readers are past the round in which they read it.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Collection, Sequence
from typing import NoReturn, cast

from mimatrix.comm.calls import PACKED_BYTES, CallHeader, CallSignature, describe_mismatch, offset_if_same
from mimatrix.comm.control import user_calls
from mimatrix.comm.control.client import ControlClient
from mimatrix.comm.control.user_calls import UserCall
from mimatrix.comm.sync import Release
from mimatrix.core.errors import WorldError

PAGE_BYTES = 4096
_HEADERS = 8
_HEADER_AT, _HEADER_BYTES = 64, 64
_USER_CALL_AT = 1024
_SPINS, _YIELDS, _YIELDS_PER_CHECK = 100, 2000, 20
_BUSY_S = 20e-6
"""CPU time of other threads after which this process counts as computing."""
_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S = 20e-6, 2e-4


class FlagSync:
    """A `Sync` over the mapped pages of a group's members. `members[i]` is the rank in the job of member i.

    `watched` are the ranks without which calls cannot end, if those are more than the members.
    """

    def __init__(
        self,
        rank: int,
        pages: Sequence[memoryview],
        members: Sequence[int],
        control: ControlClient,
        timeout_s: float,
        *,
        group: str,
        watched: Sequence[int] | None = None,
    ) -> None:
        self._group, self.user_call = group, cast("UserCall | None", None)
        self._rank, self._pages, self._members = rank, pages, members
        self._watched = members if watched is None else watched
        self._counts = [page[:8].cast("Q") for page in pages]
        self._control, self._timeout_s = control, timeout_s
        self._fence = threading.Lock()
        self._number, self._base, self._next = -1, 0, 1  # a new page is zero: nothing is announced
        self._call: CallSignature | None = None
        self._calls: list[tuple[int, CallSignature | None, UserCall | None]] = [(-1, None, None)] * _HEADERS
        self._packed = [b""] * _HEADERS
        self._broken = ""
        self._round = 0
        self._offsets: dict[int, int] = {}
        self._unread: deque[Release] = deque()
        self.waited_s = 0.0

    def begin(self, call: CallSignature, offset: int, rounds: int) -> None:
        """Announce a call whose data lie at `offset` of the arena."""
        if self._broken:
            raise WorldError(f"this group is broken: {self._broken}; create a new one")
        if len(self._unread) == _HEADERS - 1:
            # The header that is about to be overwritten may still be unread by a slow peer.
            self.wait_released(self._unread.popleft())
        self._number += 1
        self._base, self._next = self._next, self._next + rounds + 1
        self._call, self._round = call, 0
        slot, user_call = self._number % _HEADERS, self.user_call
        self._calls[slot] = (self._number, call, user_call)
        self._offsets.clear()
        packed = self._packed[slot] = call.pack(self._number, offset, user_call.code if user_call else 0)
        page = self._pages[self._rank]
        page[_header_at(self._number)] = packed
        if user_call:
            page[_user_call_at(self._number)] = user_call.packed
        self._control.begun[self._group] = self._number
        self._publish(self._base)

    def wait(self, number: int, peers: Collection[int]) -> None:
        """Wait until each of `peers` has finished the rounds before `number`."""
        self._round = number
        for peer in peers:
            if self._counts[peer][0] < self._base + number:
                self._wait_for(peer, self._base + number, self._number)
            if peer not in self._offsets:
                self._offsets[peer] = self._check_header(peer)

    def offset_of(self, peer: int) -> int:
        """Return where a peer that was waited for has its data of this call."""
        return self._offsets[peer]

    def finish(self, number: int) -> None:
        """Announce that this rank has finished round `number`: peers may read what it wrote."""
        self._publish(self._base + number + 1)

    def end(self, readers: Sequence[tuple[int, int]]) -> Release:
        """End the call; `readers` are the peers that read its data, each with the last round in which it does."""
        release = tuple((peer, self._base + number + 1, self._number) for peer, number in readers)
        self._unread.append(release)
        return release

    def fail(self, error: BaseException) -> None:
        """Announce that this rank cannot finish its call; it makes no further call in this group."""
        self._broken = f"{self._call} ended with {type(error).__name__}: {error}"
        self._control.report_failure(self._watched, f"{self._call}, round {self._round}", error)

    def wait_released(self, release: Release) -> None:
        """Wait until all readers have released the data."""
        for peer, count, number in release:
            if self._counts[peer][0] < count:
                self._wait_for(peer, count, number)
            # A rank that is only read from, such as the root of a broadcast, compares its readers' calls here.
            self._compare(peer, number)

    def _publish(self, count: int) -> None:
        # Taking a lock is a memory barrier: peers see what was written before they see the count.
        with self._fence:
            self._counts[self._rank][0] = count

    def _wait_for(self, peer: int, count: int, number: int) -> None:
        """Spin a little, then yield, then sleep: ranks may outnumber cores."""
        started = time.perf_counter()
        if not self._spin(self._counts[peer], count):
            self._sleep(peer, count, number)
        self.waited_s += time.perf_counter() - started

    def _spin(self, counts: memoryview, count: int) -> bool:
        """Return whether the count was reached within a moment."""
        for _ in range(_SPINS):
            if counts[0] >= count:
                return True
        before = _other_threads_s()
        for number in range(1, _YIELDS + 1):
            os.sched_yield()
            if counts[0] >= count:
                return True
            if number % _YIELDS_PER_CHECK == 0 and _other_threads_s() - before > _BUSY_S:
                return False
        return False

    def _sleep(self, peer: int, count: int, number: int) -> None:
        counts, started, user_call = self._counts[peer], time.monotonic(), self._calls[number % _HEADERS][2]
        doing = f"{self._call}, call number {self._number}, round {self._round}, since {time.strftime('%H:%M:%S')}"
        self._control.begin_waiting(self._members[peer], self._call, self._round)
        self._control.await_arrival(self._group, number, (self._members[peer],), user_call)
        pause = _SHORTEST_SLEEP_S
        while True:
            self._control.note_waiting(self._group)
            failure = self._control.failure(self._members[peer], self._watched, doing, user_call)
            if counts[0] >= count:
                break
            if failure:
                raise failure
            waited_s = time.monotonic() - started
            if waited_s > self._timeout_s:
                self._control.report_timeout(self._members[peer], self._watched, doing, waited_s)
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_SLEEP_S)
        self._control.end_arrival(self._group)
        self._control.end_waiting()

    def _check_header(self, peer: int) -> int:
        """Return where a peer's data of this call lie, and raise if it makes another call."""
        offset = offset_if_same(self._packed[self._number % _HEADERS], self._raw_header(peer, self._number))
        if offset is not None:
            return offset
        header = self._header(peer, self._number)
        if header.number != self._number:
            self._raise_mismatch(peer, self._number, header)
        self._compare(peer, self._number)
        return header.offset

    def _compare(self, peer: int, number: int) -> None:
        """Raise if a peer made another call; if its header was overwritten, it was compared before."""
        if offset_if_same(self._packed[number % _HEADERS], self._raw_header(peer, number)) is not None:
            return
        call_number, call, user_call = self._calls[number % _HEADERS]
        header = self._header(peer, number)
        if call_number != number or number != header.number or not call:
            return
        is_other_call = user_call and header.user_call not in (0, user_call.code)
        if is_other_call or not header.matches(call):
            self._raise_mismatch(peer, number, header)

    def _header(self, peer: int, number: int) -> CallHeader:
        return CallHeader.unpack(self._raw_header(peer, number))

    def _raw_header(self, peer: int, number: int) -> bytes:
        return bytes(self._pages[peer][_header_at(number)])

    def _raise_mismatch(self, peer: int, number: int, header: CallHeader) -> NoReturn:
        _, call, user_call = self._calls[number % _HEADERS]
        assert call
        ranks = self._members[self._rank], self._members[peer]
        other_call = UserCall.unpack(bytes(self._pages[peer][_user_call_at(number)])) if header.user_call else None
        if user_calls.explain_mismatch(user_call, other_call):
            self._control.report_different_calls({ranks[0]: user_call, ranks[1]: other_call})
        own, other = map(self._control.describe, ranks)
        self._control.report_mismatch(describe_mismatch(number, own, call, other, header), ranks)


def _header_at(number: int) -> slice:
    """Return where the header of a call is in a page."""
    start = _HEADER_AT + _HEADER_BYTES * (number % _HEADERS)
    return slice(start, start + PACKED_BYTES)


def _user_call_at(number: int) -> slice:
    """Return where a page describes the user's call of a header."""
    start = _USER_CALL_AT + user_calls.PACKED_BYTES * (number % _HEADERS)
    return slice(start, start + user_calls.PACKED_BYTES)


def _other_threads_s() -> float:
    """Return the CPU time of this process's other threads: a thread that waits must not take it from them."""
    return time.process_time() - time.thread_time()
