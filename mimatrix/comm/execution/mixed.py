"""The executor on windows and messages: peers of the own host are read in their memory, all others send.

While messages are on their way, this rank adds up what its host has for the round.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial

import torch

from mimatrix.collectives.hierarchical import Groups
from mimatrix.collectives.schedule import Schedule
from mimatrix.comm.calls import CallSignature
from mimatrix.comm.control.client import ControlClient
from mimatrix.comm.execution.one_sided import OneSidedExecutor
from mimatrix.comm.execution.program import Program, ProgramStep, Read
from mimatrix.comm.execution.send_recv import PointToPoint, PostedReceives, SendRecvExecutor
from mimatrix.comm.execution.staging import StagedChunk
from mimatrix.comm.memory.arena import Slot
from mimatrix.core.errors import UnsuitedError, WorldError


class MixedExecutor(SendRecvExecutor):
    """Runs programs for one rank of a group on several hosts.

    `places` has the members on this rank's host, each with its place among them, as `windows` numbers them.
    Tensors pass through `slots` of the arena, in chunks of `chunk_bytes`, which is the same on all ranks.
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
        slots: Sequence[Slot],
        chunk_bytes: int,
    ) -> None:
        super().__init__(backend, members, control, timeout_s)
        self._windows, self._places, self._slots, self.chunk_bytes = windows, places, slots, chunk_bytes
        self._has_failed = False

    def run_chunk(self, call: CallSignature, program: Program, chunk: StagedChunk, number: int) -> None:
        """Run a program on a chunk, the `number`th of its tensor: through the arena, where peers of this host read."""
        slot, sync = self._slots[number % len(self._slots)], self._windows.sync
        chunk.fill_slot(slot, call.dtype)
        staged = slot.tensor(call.dtype, chunk.count)
        sync.begin(call, slot.offset, len(program.steps))
        try:
            self.run(call, program, staged)
        except BaseException as error:
            self._has_failed = True
            # Counts only grow: if this rank continued with other calls, peers would take this one for done.
            sync.fail(error)
            # A peer may wait for this rank only, and not for the one that is lost.
            self._control.pass_on(error, self._members)
            raise
        readers = [(self._places[peer], last) for peer, last in program.readers if peer in self._places]
        slot.add_readers(partial(sync.wait_released, sync.end(readers)))
        chunk.drain(staged)

    def close(self) -> None:
        """Return the slots to the arena once peers have read them."""
        if self._has_failed:
            return  # messages that are still in flight may be written there
        for slot in self._slots:
            with suppress(WorldError):  # lost peers do not read any more
                slot.wait_readers()
            slot.arena.release(slot)
        self._slots = ()

    def _messages_of(self, step: ProgramStep) -> ProgramStep:
        """Return what messages carry of a round: what comes from other hosts, and goes to them."""
        reads = [read for read in map(self._message, step.reads) if read]
        serves = [serve for serve in step.serves if serve.peer not in self._places]
        return replace(step, reads=tuple(reads), serves=tuple(serves))

    def _message(self, read: Read) -> Read | None:
        sources = tuple(peer for peer in read.sources if peer not in self._places)
        return replace(read, sources=sources) if sources else None

    def _read(
        self, number: int, step: ProgramStep, posted: PostedReceives, call: CallSignature, flat: torch.Tensor
    ) -> None:
        sync = self._windows.sync
        sync.wait(number, [self._places[peer] for peer in step.waits if peer in self._places])
        for read in sorted(step.reads, key=lambda read: self._message(read) is not None):
            sources = self._sources(read, posted, call)
            if read.adds:
                self._reduce(read, sources, call, flat)
            elif read.sources[0] in self._places:
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
        place, size = self._places[peer], call.dtype.itemsize
        start = self._windows.sync.offset_of(place)
        return self._windows.view_peer(place, start + read.start * size, start + read.stop * size, call.dtype)


def check_mixed(schedule: Schedule, hosts: Groups) -> None:
    """Raise unless a schedule can run on windows and messages.

    A message that is received in place is written when it comes, which peers of the own host do not wait for. So none
    of them may have read there before.
    """
    host_of = {rank: number for number, ranks in enumerate(hosts) for rank in ranks}
    read_before: set[tuple[int, int]] = set()
    for moves in schedule.rounds:
        for move in moves:
            is_message = host_of[move.src] != host_of[move.dst]
            if is_message and not move.adds and any((move.dst, block) in read_before for block in move.blocks):
                raise UnsuitedError(
                    f"{schedule.algorithm} would replace by messages what ranks of the same host read; use two_level"
                )
        for move in moves:
            if host_of[move.src] == host_of[move.dst]:
                read_before |= {(move.src, block) for block in move.blocks}
