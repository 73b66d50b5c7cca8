"""Synchronisation between hosts: one message to the coordinator and one back for every round, however many ranks.

Stronger than the wait rule, because all ranks wait for all; so every schedule that was proved is safe under it.
"""

import time
from collections.abc import Collection, Sequence
from typing import Any

from mimatrix.comm.calls import CallHeader, CallSignature, describe_mismatch
from mimatrix.comm.control import user_calls
from mimatrix.comm.control.client import ControlClient
from mimatrix.comm.control.user_calls import UserCall
from mimatrix.comm.sync import Release
from mimatrix.core.errors import WorldError

_POLL_S = 0.05


class CoordinatorSync:
    """A `Sync` over the coordinator. A ticket numbers the rounds of all calls of the group."""

    def __init__(self, group: str, members: Sequence[int], control: ControlClient, timeout_s: float) -> None:
        self._group, self._members, self._control, self._timeout_s = group, members, control, timeout_s
        self._number, self._base, self._next, self._reached = -1, 0, 1, 0
        self._call: CallSignature | None = None
        self.user_call: UserCall | None = None
        self._broken = ""
        self._offsets: list[int] = []
        self._round = 0
        self.waited_s = 0.0

    def begin(self, call: CallSignature, offset: int, rounds: int) -> None:
        """Announce a call whose data lie at `offset` of the arena."""
        if self._broken:
            raise WorldError(f"this group is broken: {self._broken}; create a new one")
        self._number += 1
        self._base, self._next = self._next, self._next + rounds + 1
        self._call, self._offsets = call, []
        self._control.begun[self._group] = self._number
        code = self.user_call.code if self.user_call else 0
        header = call.pack(self._number, offset, code).hex()
        self._arrive(self._base, [header, self.user_call.to_json() if self.user_call else None])

    def wait(self, number: int, peers: Collection[int]) -> None:
        """Wait until all members have finished the rounds before `number`."""
        self._round = number
        if peers or number == 0:
            self._wait_for(self._base + number)

    def offset_of(self, peer: int) -> int:
        """Return where a peer has its data of this call."""
        return self._offsets[peer]

    def finish(self, number: int) -> None:
        """Announce that this rank has finished round `number`."""
        self._arrive(self._base + number + 1, None)

    def end(self, readers: Sequence[tuple[int, int]]) -> Release:
        """End the call; its data may be overwritten once all members have finished the last round."""
        return ((0, self._next - 1, self._number),) if readers else ()

    def fail(self, error: BaseException) -> None:
        """Announce that this rank cannot finish its call; it makes no further call in this group."""
        self._broken = f"{self._call} ended with {type(error).__name__}: {error}"
        self._control.report_failure(self._members, f"{self._call}, round {self._round}", error)

    def wait_released(self, release: Release) -> None:
        """Wait until all members have reached the ticket of the release."""
        for _, ticket, _ in release:
            self._wait_for(ticket)

    def _arrive(self, ticket: int, payload: list[Any] | None) -> None:
        self._control.arrive(self._group, ticket, self._members, payload)

    def _wait_for(self, ticket: int) -> None:
        started = time.perf_counter()
        self._control.begin_waiting(None, self._call, self._round)
        self._poll_until(ticket)
        self._control.end_arrival(self._group)
        self._control.end_waiting()
        self.waited_s += time.perf_counter() - started

    def _poll_until(self, ticket: int) -> None:
        started, since = time.monotonic(), time.strftime("%H:%M:%S")
        others = [rank for rank in self._members if rank != self._control.rank]
        self._control.await_arrival(self._group, self._number, others, self.user_call)
        while self._reached < ticket:
            self._control.note_waiting(self._group)
            doing = f"{self._call}, call number {self._number}, round {self._round}, since {since}"
            failure = self._control.failure(-1, self._members, doing, self.user_call)
            payloads = self._control.wait_arrivals(self._group, self._reached + 1, 0.0 if failure else _POLL_S)
            if payloads is not None:
                self._reached += 1
                self._compare(payloads)
                continue
            if failure:
                raise failure
            waited_s = time.monotonic() - started
            if waited_s > self._timeout_s:
                arrival = (self._group, self._reached + 1)
                self._control.report_timeout(others[0], self._members, doing, waited_s, arrival)

    def _compare(self, payloads: list[list[Any] | None]) -> None:
        """Compare what all members announced at the start of a call, and take the offsets of their data."""
        announced = [payload for payload in payloads if payload is not None]
        if not announced:
            return
        headers = [CallHeader.unpack(bytes.fromhex(header)) for header, _ in announced]
        assert self._call
        for rank, header, (_, fields) in zip(self._members, headers, announced, strict=True):
            other_call = UserCall.from_json(fields)
            is_same = header.matches(self._call)
            if user_calls.are_different(self.user_call, other_call) or (
                not is_same and user_calls.explain_mismatch(self.user_call, other_call)
            ):
                self._control.report_different_calls({self._control.rank: self.user_call, rank: other_call})
            if not is_same:
                own, peer = self._control.describe(self._control.rank), self._control.describe(rank)
                text = describe_mismatch(self._number, own, self._call, peer, header)
                self._control.report_mismatch(text, (self._control.rank, rank))
        self._offsets = [header.offset for header in headers]
