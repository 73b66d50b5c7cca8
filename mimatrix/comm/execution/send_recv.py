"""The executor on messages: runs a program by sends and receives over any c10d backend."""

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch

from mimatrix.comm.calls import CallSignature
from mimatrix.comm.control.client import ControlClient
from mimatrix.comm.execution.program import Program, ProgramStep, Read
from mimatrix.comm.execution.reduce import reduce_into


class PendingTransfer(Protocol):
    """A message under way."""

    def wait(self, timeout: timedelta) -> Any:
        """Until it has been sent or has arrived."""
        ...


class PointToPoint(Protocol):
    """What is needed of a c10d backend."""

    def send(self, tensors: list[torch.Tensor], dstRank: int, tag: int) -> PendingTransfer:  # noqa: N803 (torch's name)
        """Start to send."""
        ...

    def recv(self, tensors: list[torch.Tensor], srcRank: int, tag: int) -> PendingTransfer:  # noqa: N803 (torch's name)
        """Start to receive."""
        ...


class Transfer(NamedTuple):
    """A message under way: what it carries, with whom."""

    start: int
    stop: int
    peer: int
    pending: PendingTransfer


Posted = dict[Read, list[tuple[Transfer, torch.Tensor]]]
"""Receives under way by what they are for: the message, and where it goes."""


class SendRecvExecutor:
    """Runs programs for one rank of one group, on tensors wherever they lie."""

    def __init__(self, backend: PointToPoint, members: Sequence[int], control: ControlClient, timeout_s: float) -> None:
        self._backend, self._members, self._control = backend, members, control
        self._timeout = timedelta(seconds=timeout_s)
        self._doing = ""
        self._scratch: dict[tuple[torch.dtype, torch.device, int], torch.Tensor] = {}

    def run(self, call: CallSignature, program: Program, flat: torch.Tensor) -> None:
        """`flat` holds this rank's data and is worked on in place.

        Receives are posted before this rank's own data are sent, and those of the next round already now where that can
        be: a permission to send that queues up behind our own data would leave the link idle in the other direction.
        """
        unsent: list[Transfer] = []
        ahead: Posted = {}
        for number, step in enumerate(program.steps):
            self._doing = f"{call}, round {number}, since {time.strftime('%H:%M:%S')}"
            posted, left = ahead, [take for take in step.takes if take not in ahead]
            # What is about to be overwritten must have left; its reader has told us so, or will soon.
            unsent = self._settled(unsent, [take for take in left if not take.adds])
            posted |= self._post(step, left, number, flat)
            ahead = self._post_ahead(program, number, unsent, flat)
            sent = self._send(step, flat)
            unsent = self._settled(unsent, [take for take in step.takes if take.adds])
            for take in step.takes:
                self._await([flight for flight, _ in posted[take]])
                if take.adds:
                    self._sum(take, [addend for _, addend in posted[take]], call, flat)
            unsent += sent
        self._await(unsent)

    def _post(self, step: ProgramStep, takes: Sequence[Read], number: int, flat: torch.Tensor) -> Posted:
        """Post receives for some takes of a round: copies straight to their place, addends into scratch memory."""
        tags, posted = _Tags(), {}
        room, at = self._scratch_for(flat, step, number), 0
        for take in step.takes:
            length = take.stop - take.start
            flights = []
            for source in take.sources:
                into = room[at : at + length] if take.adds else flat[take.start : take.stop]
                at += length if take.adds else 0
                tag = tags.next(source, adds=take.adds)
                if take in takes:
                    pending = self._backend.recv([into], source, tag)
                    flights.append((Transfer(take.start, take.stop, source, pending), into))
            if take in takes:
                posted[take] = flights
        return posted

    def _post_ahead(self, program: Program, number: int, unsent: Sequence[Transfer], flat: torch.Tensor) -> Posted:
        """Receives of the next round that touch nothing which this round still reads, writes or sends."""
        if number + 1 == len(program.steps):
            return {}
        step, following = program.steps[number], program.steps[number + 1]
        busy = [(take.start, take.stop) for take in step.takes]
        busy += [(give.start, give.stop) for give in step.gives] + [(flight.start, flight.stop) for flight in unsent]
        free = [take for take in following.takes if take.adds or not _overlaps(take, busy)]
        return self._post(following, free, number + 1, flat)

    def _send(self, step: ProgramStep, flat: torch.Tensor) -> list[Transfer]:
        tags, flights = _Tags(), []
        for give in step.gives:
            tag = tags.next(give.peer, adds=give.adds)
            pending = self._backend.send([flat[give.start : give.stop]], give.peer, tag)
            flights.append(Transfer(give.start, give.stop, give.peer, pending))
        return flights

    def _settled(self, unsent: list[Transfer], takes: Sequence[Read]) -> list[Transfer]:
        """Wait for the sends that overlap with what `takes` will write; give those that are left."""
        written = [(take.start, take.stop) for take in takes]
        leaving = [flight for flight in unsent if _overlaps(flight, written)]
        self._await(leaving)
        return [flight for flight in unsent if flight not in leaving]

    def _await(self, flights: Sequence[Transfer]) -> None:
        """Until they have landed; a peer that does not come is named."""
        for flight in flights:
            peer = self._members[flight.peer]
            self._control.begin_waiting(peer, self._doing, 0)
            try:
                flight.pending.wait(self._timeout)
            except RuntimeError:
                self._control.report_timeout(peer, self._members, self._doing, self._timeout.total_seconds())
            self._control.end_waiting()

    def _sum(self, take: Read, addends: list[torch.Tensor], call: CallSignature, flat: torch.Tensor) -> None:
        divisor = len(self._members) if take.completes and call.op == "avg" else 1
        reduce_into(flat[take.start : take.stop], addends, call.op, divisor)

    def _scratch_for(self, flat: torch.Tensor, step: ProgramStep, number: int) -> torch.Tensor:
        """Room for all addends of a round; rounds take turns, since the next one is posted while this one goes on."""
        count = sum((take.stop - take.start) * len(take.sources) for take in step.takes if take.adds)
        key = (flat.dtype, flat.device, number % 2)
        if key not in self._scratch or len(self._scratch[key]) < count:
            self._scratch[key] = torch.empty(count, dtype=flat.dtype, device=flat.device)
        return self._scratch[key]


def _overlaps(one: Read | Transfer, others: Sequence[tuple[int, int]]) -> bool:
    return any(one.start < stop and start < one.stop for start, stop in others)


class _Tags:
    """Numbers the messages between two ranks in one round, sums and copies apart."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, bool], int] = {}

    def next(self, peer: int, *, adds: bool) -> int:
        """The tag of the next message with this peer."""
        number = self._counts.get((peer, adds), 0)
        self._counts[peer, adds] = number + 1
        return 2 * number + adds
