"""The executor on windows and messages: peers of the own host are read in their memory, all others send.

While messages are on their way, this rank adds up what its host has for the round.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from mimatrix.comm.calls import CallSignature
from mimatrix.comm.control.client import ControlClient
from mimatrix.comm.execution.one_sided import OneSidedExecutor
from mimatrix.comm.execution.program import Program, ProgramStep, Read
from mimatrix.comm.execution.send_recv import PointToPoint, PostedReceives, SendRecvExecutor
from mimatrix.comm.sync import Release, Sync
from mimatrix.core.errors import UnsuitedError


class MixedExecutor(SendRecvExecutor):
    """Runs programs for one rank of a group on several hosts.

    `places` has the members on this rank's host, each with its place among them, as `windows` numbers them.
    `chunk_bytes` is how much of a tensor is in the arena at a time, the same on all ranks.
    """

    def __init__(
        self,
        backend: PointToPoint,
        members: Sequence[int],
        control: ControlClient,
        timeout_s: float,
        *,
        windows: OneSidedExecutor,
        places: Mapping[int, int],
        chunk_bytes: int,
    ) -> None:
        super().__init__(backend, members, control, timeout_s)
        self._windows, self.places, self.chunk_bytes = windows, places, chunk_bytes

    @property
    def sync(self) -> Sync:
        """How this rank waits for peers of its host."""
        return self._windows.sync

    def run_in_arena(self, call: CallSignature, program: Program, flat: torch.Tensor, offset: int) -> Release:
        """Run a program in place on `flat`, which lies at `offset` of the arena; return what its readers release."""
        sync = self.sync
        sync.begin(call, offset, len(program.steps))
        try:
            self.run(call, program, flat)
        except BaseException as error:
            # Counts only grow: if this rank continued with other calls, peers would take this one for done.
            sync.fail(error)
            raise
        return sync.end([(self.places[peer], last) for peer, last in program.readers if peer in self.places])

    def _messages_of(self, step: ProgramStep) -> ProgramStep:
        """Return what messages carry of a round: what comes from other hosts, and goes to them."""
        reads = [read for read in map(self._message, step.reads) if read]
        serves = [serve for serve in step.serves if serve.peer not in self.places]
        return replace(step, reads=tuple(reads), serves=tuple(serves))

    def _message(self, read: Read) -> Read | None:
        sources = tuple(peer for peer in read.sources if peer not in self.places)
        return replace(read, sources=sources) if sources else None

    def _read(
        self, number: int, step: ProgramStep, posted: PostedReceives, call: CallSignature, flat: torch.Tensor
    ) -> None:
        sync = self.sync
        sync.wait(number, [self.places[peer] for peer in step.waits if peer in self.places])
        for read in sorted(step.reads, key=lambda read: self._message(read) is not None):
            sources = self._sources(read, posted, call)
            if read.adds:
                self._reduce(read, sources, call, flat)
            elif read.sources[0] in self.places:
                flat[read.start : read.stop].copy_(sources[0])
        sync.finish(number)

    def _sources(self, read: Read, posted: PostedReceives, call: CallSignature) -> list[torch.Tensor]:
        """Return what is read, in the order of its sources: memory of peers, and messages once they have come."""
        message = self._message(read)
        received = posted[message] if message else []
        self._wait_for([transfer for transfer, _ in received])
        from_peers = {transfer.peer: tensor for transfer, tensor in received}
        return [from_peers[peer] if peer in from_peers else self._view(peer, read, call) for peer in read.sources]

    def _view(self, peer: int, read: Read, call: CallSignature) -> torch.Tensor:
        place, size = self.places[peer], call.dtype.itemsize
        start = self.sync.offset_of(place)
        return self._windows.view_peer(place, start + read.start * size, start + read.stop * size, call.dtype)


def check_mixed(program: Program, places: Mapping[int, int]) -> None:
    """Raise unless a program can run on windows and messages.

    A message that is received in place is written when it comes, which peers of the own host do not wait for. So none
    of them may have read there before.
    """
    read_before: list[tuple[int, int]] = []
    for step in program.steps:
        received = [read for read in step.reads if not read.adds and read.sources[0] not in places]
        if any(read.start < stop and start < read.stop for read in received for start, stop in read_before):
            raise UnsuitedError("a message would replace what peers of this host read; use two_level")
        read_before += [(serve.start, serve.stop) for serve in step.serves if serve.peer in places]
