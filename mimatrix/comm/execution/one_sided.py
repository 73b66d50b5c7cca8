"""The executor on windows: runs a program by pulling, straight out of the peers' memory where it is mapped."""

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

import torch

from mimatrix.comm.calls import CallSignature
from mimatrix.comm.execution.program import Program, ProgramStep, Read
from mimatrix.comm.execution.reduce import reduce_into
from mimatrix.comm.memory import PeerWindow
from mimatrix.comm.memory.arena import Arena
from mimatrix.comm.memory.shared_storage import BEYOND
from mimatrix.comm.sync.flag_sync import Release

_MOST_VIEWS = 1 << 14


class Sync(Protocol):
    """How ranks of a group wait for one another; see `Flags` and `CoordinatorSync`."""

    waited_s: float
    """How long this rank has waited for others, all calls together."""

    def begin(self, call: CallSignature, offset: int, rounds: int) -> None:
        """The data of this call lie ready at `offset`."""
        ...

    def wait(self, number: int, peers: Collection[int]) -> None:
        """Until each of `peers` has finished the rounds before `number`."""
        ...

    def offset_of(self, peer: int) -> int:
        """Where a peer that was waited for has its data of this call."""
        ...

    def finish(self, number: int) -> None:
        """Say that this rank has done its round `number`."""
        ...

    def end(self, readers: Sequence[tuple[int, int]]) -> Release:
        """When the data of this call may be overwritten."""
        ...

    def wait_released(self, release: Release) -> None:
        """Until all its readers have let go."""
        ...

    def fail(self, error: BaseException) -> None:
        """Say that this rank cannot go on in the middle of a call."""
        ...


class OneSidedExecutor:
    """Runs programs for one rank of one group. `peers[i]` is the window of member i (None for this rank)."""

    sees_peers = True
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
        """The call's data lie at `offset` of the arena; back when this rank has done its part.

        `meanwhile` is called once, when the peers can already read. With `outside` a direct program runs on data there,
        of which only what peers read lies in the arena: sums are made of them and put into the arena for the peers, and
        results go outside. `within` are the data themselves, at a place beside the arena that peers know.
        """
        sync = self.sync
        self.settle()
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
            # Counts only grow: if this rank went on to other calls, peers would take this one for done.
            sync.fail(error)
            raise
        return sync.end(program.readers)

    def _step(self, step: ProgramStep, call: CallSignature, offset: int) -> None:
        for take in step.takes:
            self._take(take, call, self._own(take, call, offset))
        self.settle()

    def _step_within(self, step: ProgramStep, call: CallSignature, within: torch.Tensor) -> None:
        for take in step.takes:
            self._take(take, call, within[take.start : take.stop])

    def _step_outside(self, step: ProgramStep, call: CallSignature, offset: int, outside: torch.Tensor) -> None:
        for take in step.takes:
            part, sources = outside[take.start : take.stop], self._theirs(take, call)
            if take.adds:
                staged = self._own(take, call, offset)
                reduce_into(staged, sources, call.op, self._divisor(take, call), part)
                sources = [staged]
            part.copy_(sources[0])
        self.settle()

    def _take(self, take: Read, call: CallSignature, target: torch.Tensor) -> None:
        sources = self._theirs(take, call)
        if take.adds:
            reduce_into(target, sources, call.op, self._divisor(take, call))
        else:
            target.copy_(sources[0])

    def _own(self, take: Read, call: CallSignature, offset: int) -> torch.Tensor:
        size = call.dtype.itemsize
        return self._view(-1, offset + take.start * size, offset + take.stop * size, call.dtype)

    def _theirs(self, take: Read, call: CallSignature) -> list[torch.Tensor]:
        size, there = call.dtype.itemsize, self.sync.offset_of
        return [
            self._view(peer, there(peer) + take.start * size, there(peer) + take.stop * size, call.dtype)
            for peer in take.sources
        ]

    def _divisor(self, take: Read, call: CallSignature) -> int:
        return len(self._peers) if take.completes and call.op == "avg" else 1

    def _view(self, peer: int, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """A range of a peer's window, or of the own for -1, as a tensor. Kept, since steps repeat."""
        if start >= BEYOND:
            return self._bytes(peer, start, stop).view(dtype)  # what lies there comes and goes
        key = (peer, start, stop, dtype)
        found = self._views.get(key)
        if found is None:
            if len(self._views) >= _MOST_VIEWS:
                self._views.clear()
            found = self._views[key] = self._bytes(peer, start, stop).view(dtype)
        return found

    def _bytes(self, peer: int, start: int, stop: int) -> torch.Tensor:
        if peer < 0:
            return self._arena.window.bytes[start:stop]
        window = self._peers[peer]
        assert window is not None
        seen = window.view(start, stop)
        assert seen is not None, "a window that is not mapped needs the fetching executor"
        return seen

    def peer_view(self, peer: int, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """A range of a peer's window, seen in place."""
        return self._bytes(peer, start, stop).view(dtype)

    def settle(self) -> None:
        """What was written must be there before it is announced; on a GPU that takes waiting."""
        if self._arena.window.bytes.is_cuda:
            torch.cuda.current_stream(self._arena.window.bytes.device).synchronize()
