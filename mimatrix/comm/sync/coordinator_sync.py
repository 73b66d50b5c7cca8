"""Synchronisation between hosts: one message to the coordinator and one back, for every round, however many ranks.

Stronger than the wait rule (all ranks wait for all), so every schedule that was proved is safe under it.
"""

import time
from collections.abc import Collection, Sequence

from mimatrix.comm.calls import CallHeader, CallSignature, disagreement
from mimatrix.comm.control.client import ControlClient
from mimatrix.comm.sync.flag_sync import Release
from mimatrix.core.errors import WorldError

_POLL_S = 0.05


class CoordinatorSync:
    """The same promises as `Flags`, kept by the coordinator."""

    def __init__(self, group: str, members: Sequence[int], control: ControlClient, timeout_s: float) -> None:
        self._group, self._members, self._control, self._timeout_s = group, members, control, timeout_s
        self._number, self._base, self._next, self._reached = -1, 0, 1, 0
        self._call: CallSignature | None = None
        self._broken = ""
        self._offsets: list[int] = []
        self._round = 0
        self.waited_s = 0.0

    def begin(self, call: CallSignature, offset: int, rounds: int) -> None:
        """The data of this call lie ready at `offset`."""
        if self._broken:
            raise WorldError(f"this group is broken: {self._broken}; make it anew")
        self._number += 1
        self._base, self._next = self._next, self._next + rounds + 1
        self._call, self._offsets = call, []
        self._arrive(self._base, call.packed(self._number, offset).hex())

    def wait(self, number: int, peers: Collection[int]) -> None:
        """Until all have finished the rounds before `number`."""
        self._round = number
        if peers or number == 0:
            self._await(self._base + number)

    def offset_of(self, peer: int) -> int:
        """Where a peer has its data of this call."""
        return self._offsets[peer]

    def finish(self, number: int) -> None:
        """Say that this rank has done its round `number`."""
        self._arrive(self._base + number + 1, None)

    def end(self, readers: Sequence[tuple[int, int]]) -> Release:
        """When the data of this call may be overwritten: once all have finished the last round."""
        return ((0, self._next - 1, self._number),) if readers else ()

    def fail(self, error: BaseException) -> None:
        """Say that this rank cannot go on in the middle of a call; it makes no further one in this group."""
        self._broken = f"{self._call} ended with {type(error).__name__}: {error}"
        self._control.report_failure(self._members, f"{self._call}, round {self._round}", error)

    def wait_released(self, release: Release) -> None:
        """Until all have come that far."""
        for _, ticket, _ in release:
            self._await(ticket)

    def _arrive(self, ticket: int, said: str | None) -> None:
        self._control.arrive(self._group, ticket, self._members, said)

    def _await(self, ticket: int) -> None:
        started = time.perf_counter()
        self._control.begin_waiting(None, self._call, self._round)
        self._until(ticket)
        self._control.end_waiting()
        self.waited_s += time.perf_counter() - started

    def _until(self, ticket: int) -> None:
        started, since = time.monotonic(), time.strftime("%H:%M:%S")
        while self._reached < ticket:
            doing = f"{self._call}, call number {self._number}, round {self._round}, since {since}"
            trouble = self._control.failure(-1, self._members, doing)
            said = self._control.wait_arrivals(self._group, self._reached + 1, 0.0 if trouble else _POLL_S)
            if said is not None:
                self._reached += 1
                self._check(said)
                continue
            if trouble:
                raise trouble
            waited = time.monotonic() - started
            if waited > self._timeout_s:
                anyone = next(rank for rank in self._members if rank != self._control.rank)
                arrival = (self._group, self._reached + 1)
                self._control.report_timeout(anyone, self._members, doing, waited, arrival)

    def _check(self, said: list[str | None]) -> None:
        """Compare what all announced with their arrival at a call's start."""
        if not said or said[0] is None:
            return
        announced = [CallHeader.unpack(bytes.fromhex(each or "")) for each in said]
        assert self._call
        for rank, theirs in zip(self._members, announced, strict=True):
            if not theirs.agrees(self._call):
                mine = self._control.name(self._control.rank)
                text = disagreement(self._number, mine, self._call, self._control.name(rank), theirs)
                self._control.report_mismatch(text, (self._control.rank, rank))
        self._offsets = [each.offset for each in announced]
