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

_FIRST_TAG = 1 << 30
"""Far from the tags of the user's own messages, which go over the same connections."""


class PendingTransfer(Protocol):
    """A message in flight."""

    def wait(self, timeout: timedelta) -> Any:
        """Wait until it has been sent or has arrived."""
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
    """A message in flight: the elements that it carries, and the peer."""

    start: int
    stop: int
    peer: int
    pending: PendingTransfer


PostedReceives = dict[Read, list[tuple[Transfer, torch.Tensor]]]
"""Receives in flight by the read that they are for: the message, and where it goes."""


class SendRecvExecutor:
    """Runs programs for one rank of one group, on tensors in any memory."""

    def __init__(self, backend: PointToPoint, members: Sequence[int], control: ControlClient, timeout_s: float) -> None:
        self._backend, self._members, self._control = backend, members, control
        self._timeout = timedelta(seconds=timeout_s)
        self._doing = ""
        self._scratch: dict[tuple[torch.dtype, torch.device, int], torch.Tensor] = {}

    def run(self, call: CallSignature, program: Program, flat: torch.Tensor) -> None:
        """Run a program in place on `flat`, which holds this rank's data.

        Receives are posted before this rank's own data are sent, and if possible already those of the next round: a
        permission to send that queues behind our own data would leave the link idle in the other direction.
        """
        unsent: list[Transfer] = []
        posted_ahead: PostedReceives = {}
        messages = [*map(self._messages_of, program.steps), None]
        for number, step in enumerate(program.steps):
            self._doing = f"{call}, round {number}, since {time.strftime('%H:%M:%S')}"
            own = messages[number]
            assert own
            posted, left = posted_ahead, [read for read in own.reads if read not in posted_ahead]
            # Data that are about to be overwritten must have been sent.
            unsent = self._wait_overlapping(unsent, [read for read in left if not read.adds])
            posted |= self._post(own, left, number, flat)
            posted_ahead = self._post_ahead(step, messages[number + 1], number + 1, unsent, flat)
            sent = self._send(own, flat)
            unsent = self._wait_overlapping(unsent, step.reads)
            self._read(number, step, posted, call, flat)
            unsent += sent
        self._wait_for(unsent)

    def _messages_of(self, step: ProgramStep) -> ProgramStep:
        """Return what messages carry of a round: all of it."""
        return step

    def _read(
        self,
        number: int,  # noqa: ARG002 (subclasses need it)
        step: ProgramStep,
        posted: PostedReceives,
        call: CallSignature,
        flat: torch.Tensor,
    ) -> None:
        """Wait for what this rank reads in a round, and add it up."""
        for read in step.reads:
            self._wait_for([transfer for transfer, _ in posted[read]])
            if read.adds:
                self._reduce(read, [addend for _, addend in posted[read]], call, flat)

    def _post(self, step: ProgramStep, reads: Sequence[Read], number: int, flat: torch.Tensor) -> PostedReceives:
        """Post receives for some reads of a round: copies go to their place, addends into scratch memory."""
        tags, posted = _Tags(), {}
        scratch, at = self._scratch_for(flat, step, number), 0
        for read in step.reads:
            length = read.stop - read.start
            transfers = []
            for source in read.sources:
                into = scratch[at : at + length] if read.adds else flat[read.start : read.stop]
                at += length if read.adds else 0
                tag = tags.next(source, adds=read.adds)
                if read in reads:
                    pending = self._backend.recv([into], source, tag)
                    transfers.append((Transfer(read.start, read.stop, source, pending), into))
            if read in reads:
                posted[read] = transfers
        return posted

    def _post_ahead(
        self,
        step: ProgramStep,
        following: ProgramStep | None,
        number: int,
        unsent: Sequence[Transfer],
        flat: torch.Tensor,
    ) -> PostedReceives:
        """Post receives of the next round, `number`, that touch nothing which this one still reads, writes or sends."""
        if following is None:
            return {}
        busy = [(read.start, read.stop) for read in step.reads]
        busy += [(serve.start, serve.stop) for serve in step.serves]
        busy += [(transfer.start, transfer.stop) for transfer in unsent]
        free = [read for read in following.reads if read.adds or not _overlaps(read, busy)]
        return self._post(following, free, number, flat)

    def _send(self, step: ProgramStep, flat: torch.Tensor) -> list[Transfer]:
        tags, transfers = _Tags(), []
        for serve in step.serves:
            tag = tags.next(serve.peer, adds=serve.adds)
            pending = self._backend.send([flat[serve.start : serve.stop]], serve.peer, tag)
            transfers.append(Transfer(serve.start, serve.stop, serve.peer, pending))
        return transfers

    def _wait_overlapping(self, unsent: list[Transfer], reads: Sequence[Read]) -> list[Transfer]:
        """Wait for the sends that overlap with what `reads` will write; return the others."""
        written = [(read.start, read.stop) for read in reads]
        overlapping = [transfer for transfer in unsent if _overlaps(transfer, written)]
        self._wait_for(overlapping)
        return [transfer for transfer in unsent if transfer not in overlapping]

    def _wait_for(self, transfers: Sequence[Transfer]) -> None:
        """Wait for transfers; raise an error that names a peer that does not come."""
        for transfer in transfers:
            peer = self._members[transfer.peer]
            self._control.begin_waiting(peer, self._doing, 0)
            try:
                transfer.pending.wait(self._timeout)
            except RuntimeError:
                self._control.report_timeout(peer, self._members, self._doing, self._timeout.total_seconds())
            self._control.end_waiting()

    def _reduce(self, read: Read, addends: list[torch.Tensor], call: CallSignature, flat: torch.Tensor) -> None:
        divisor = len(self._members) if read.completes and call.reduce_op == "avg" else 1
        reduce_into(flat[read.start : read.stop], addends, call.reduce_op, divisor)

    def _scratch_for(self, flat: torch.Tensor, step: ProgramStep, number: int) -> torch.Tensor:
        """Return memory for the addends of a round; two take turns, as the next round is posted during this one."""
        count = sum((read.stop - read.start) * len(read.sources) for read in step.reads if read.adds)
        key = (flat.dtype, flat.device, number % 2)
        if key not in self._scratch or len(self._scratch[key]) < count:
            self._scratch[key] = torch.empty(count, dtype=flat.dtype, device=flat.device)
        return self._scratch[key]


def _overlaps(span: Read | Transfer, others: Sequence[tuple[int, int]]) -> bool:
    return any(span.start < stop and start < span.stop for start, stop in others)


class _Tags:
    """Numbers the messages between two ranks in one round, sums and copies apart."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, bool], int] = {}

    def next(self, peer: int, *, adds: bool) -> int:
        """Return the tag of the next message with a peer."""
        number = self._counts.get((peer, adds), 0)
        self._counts[peer, adds] = number + 1
        return _FIRST_TAG + 2 * number + adds
