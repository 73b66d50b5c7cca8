"""The executor on windows: runs a program by reading straight from the peers' mapped memory."""

from collections.abc import Callable, Sequence

import torch

from mimatrix.comm.calls import CallSignature
from mimatrix.comm.execution.program import Program, ProgramStep, Read
from mimatrix.comm.execution.reduce import reduce_into
from mimatrix.comm.memory.arena import Arena
from mimatrix.comm.memory.base import PeerWindow
from mimatrix.comm.memory.shared_storage import STORAGE_SPACE
from mimatrix.comm.sync import Release, Sync

_MAX_VIEWS = 1 << 14


class OneSidedExecutor:
    """Runs programs for one rank of one group. `peers[i]` is the window of member i (None for this rank)."""

    maps_peers = True
    """Whether peers' memory is mapped, so that it can be read in place."""

    def __init__(self, arena: Arena, peers: Sequence[PeerWindow | None], sync: Sync) -> None:
        self._arena, self._peers, self.sync = arena, peers, sync
        self._views: dict[tuple[int, int, int, torch.dtype], torch.Tensor] = {}

    def run(
        self,
        call: CallSignature,
        program: Program,
        offset: int,
        meanwhile: Callable[[], None] | None = None,
        outside: torch.Tensor | None = None,
        within: torch.Tensor | None = None,
    ) -> Release:
        """Run a program on data at `offset` of the arena; return once this rank has done its part.

        Args:
            call: What is announced to the peers.
            program: What this rank reads.
            offset: Where peers find this rank's data.
            meanwhile: Called once, when peers can already read.
            outside: For a direct program: the data, of which only what peers read is in the arena. Sums of them are
                written to the arena for the peers, and results to `outside`.
            within: The data themselves, if they are in shared storage instead of the arena.
        """
        sync = self.sync
        self.synchronize()
        sync.begin(call, offset, len(program.steps))
        try:
            if meanwhile:
                meanwhile()
            for number, step in enumerate(program.steps):
                sync.wait(number, step.waits)
                if within is not None:
                    self._step_within(step, call, within)
                elif outside is None:
                    self._step(step, call, offset)
                else:
                    self._step_outside(step, call, offset, outside)
                sync.finish(number)
        except BaseException as error:
            # Counts only grow: if this rank continued with other calls, peers would take this one for done.
            sync.fail(error)
            raise
        return sync.end(program.readers)

    def view_peer(self, peer: int, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a range of a peer's window in place."""
        return self._bytes(peer, start, stop).view(dtype)

    def synchronize(self) -> None:
        """On a GPU, wait until what was written is in memory, before it is announced."""
        if self._arena.window.bytes.is_cuda:
            torch.cuda.current_stream(self._arena.window.bytes.device).synchronize()

    def _step(self, step: ProgramStep, call: CallSignature, offset: int) -> None:
        for read in step.reads:
            self._read(read, call, self._target(read, call, offset))
        self.synchronize()

    def _step_within(self, step: ProgramStep, call: CallSignature, within: torch.Tensor) -> None:
        for read in step.reads:
            self._read(read, call, within[read.start : read.stop])

    def _step_outside(self, step: ProgramStep, call: CallSignature, offset: int, outside: torch.Tensor) -> None:
        for read in step.reads:
            part, sources = outside[read.start : read.stop], self._sources(read, call)
            if read.adds:
                staged = self._target(read, call, offset)
                reduce_into(staged, sources, call.reduce_op, self._divisor(read, call), part)
                sources = [staged]
            part.copy_(sources[0])
        self.synchronize()

    def _read(self, read: Read, call: CallSignature, target: torch.Tensor) -> None:
        sources = self._sources(read, call)
        if read.adds:
            reduce_into(target, sources, call.reduce_op, self._divisor(read, call))
        else:
            target.copy_(sources[0])

    def _target(self, read: Read, call: CallSignature, offset: int) -> torch.Tensor:
        size = call.dtype.itemsize
        return self._view(-1, offset + read.start * size, offset + read.stop * size, call.dtype)

    def _sources(self, read: Read, call: CallSignature) -> list[torch.Tensor]:
        size, offset_of = call.dtype.itemsize, self.sync.offset_of
        return [
            self._view(peer, offset_of(peer) + read.start * size, offset_of(peer) + read.stop * size, call.dtype)
            for peer in read.sources
        ]

    def _divisor(self, read: Read, call: CallSignature) -> int:
        return len(self._peers) if read.completes and call.reduce_op == "avg" else 1

    def _view(self, peer: int, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a range of a peer's window, or of the own for -1; cached, because steps repeat."""
        if start >= STORAGE_SPACE:
            return self._bytes(peer, start, stop).view(dtype)  # shared storages come and go
        key = (peer, start, stop, dtype)
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            view = self._views[key] = self._bytes(peer, start, stop).view(dtype)
        return view

    def _bytes(self, peer: int, start: int, stop: int) -> torch.Tensor:
        if peer < 0:
            return self._arena.window.bytes[start:stop]
        window = self._peers[peer]
        assert window is not None
        view = window.view(start, stop)
        assert view is not None, "windows that are not mapped need the remote read executor"
        return view
