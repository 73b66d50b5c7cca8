"""The calls of a group that windows carry: in place in the arena, over shared storage, or staged chunk by chunk."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from mimatrix.collectives.schedule import Collective
from mimatrix.collectives.shares import Shares
from mimatrix.comm.calls import SHARDED, CallSignature, CollectiveOp
from mimatrix.comm.execution import staging
from mimatrix.comm.execution.one_sided import OneSidedExecutor
from mimatrix.comm.execution.staging import StagedChunk, StagingSlots, copy_back
from mimatrix.comm.memory.arena import Arena, Slot
from mimatrix.comm.memory.memfd import MemfdWindow
from mimatrix.comm.program_cache import ProgramCache
from mimatrix.comm.sync import Release, Sync
from mimatrix.comm.tuning.choice import AlgorithmChoice


class WindowCalls:
    """Runs collectives of one group over windows, by an executor for each kind of window that all members reach."""

    def __init__(
        self,
        executors: Mapping[str, OneSidedExecutor],
        arenas: Mapping[str, Arena],
        sync: Sync,
        programs: ProgramCache,
        *,
        world_size: int,
        has_mixed_devices: bool,
        lazy_release: bool,
    ) -> None:
        self._executors, self._arenas, self._sync, self._programs = executors, arenas, sync, programs
        self._world_size, self._has_mixed_devices, self._lazy_release = world_size, has_mixed_devices, lazy_release
        self._staging = StagingSlots(arenas, world_size)

    @property
    def window_kinds(self) -> tuple[str, ...]:
        """The kinds of windows over which all members reach each other."""
        return tuple(self._executors)

    def window_kind(self, tensor: torch.Tensor) -> str:
        """Return the kind of window for a tensor: its GPU's if all ranks have one, otherwise the host's."""
        return "cuda" if tensor.is_cuda and "cuda" in self._executors else next(iter(self._executors), "host")

    def find_slot(self, tensor: torch.Tensor) -> tuple[str, Slot, int] | None:
        """Return the window kind, the slot and the offset of a tensor in an arena, or None if it is in none."""
        for window_kind in self._executors:
            if placed := self._arenas[window_kind].slot_of(tensor):
                return (window_kind, *placed)
        return None

    def view_peer(self, member: int, start: int, stop: int, dtype: torch.dtype) -> torch.Tensor:
        """Return bytes [start, stop) of a member's host arena as a tensor over its memory."""
        return self._executors["host"].view_peer(member, start, stop, dtype)

    def allocate_staging(self, window_kind: str) -> None:
        """Allocate the staging slots now, before the arena fills up, instead of at their first use."""
        self._staging.get(window_kind, staging.CHUNK_BYTES[window_kind])

    def close(self) -> None:
        """Release the staging slots."""
        self._staging.close()

    def share_storage(self, tensor: torch.Tensor) -> None:
        """Let peers read a tensor's memory in place from now on, although it is not in the arena.

        torch moves the memory, and a NumPy array over it would keep the old one. So this is only for tensors that no
        other library holds, such as DDP's buckets.
        """
        window = self._arenas["host"].window if "host" in self._executors else None
        if isinstance(window, MemfdWindow):
            window.storages.share(tensor.untyped_storage())

    def run_in_place(
        self, op: CollectiveOp, count: int, choice: AlgorithmChoice, window_kind: str, slot: Slot, offset: int
    ) -> None:
        """Run a collective on `count` elements that lie in an arena, at `offset` in its window."""
        slot.wait_readers()
        call = CallSignature.of(op, count, choice)
        release = self._executors[window_kind].run(call, self._programs.compiler(op, choice).program(count), offset)
        if self._lazy_release:
            slot.add_readers(partial(self._sync.wait_released, release))
        else:
            self._sync.wait_released(release)

    def run_staged(self, op: CollectiveOp, tensor: torch.Tensor, choice: AlgorithmChoice) -> None:
        """Run a collective on a tensor outside the arenas: through staging slots, or where it lies if it is shared."""
        flat, window_kind = tensor.reshape(-1), self.window_kind(tensor)
        chunk_bytes = self._chunk_bytes(op, window_kind)
        if op.collective in SHARDED and flat.nbytes > chunk_bytes:
            counts = (op.shares or choice.shares or Shares.equal(self._world_size)).cut(flat.numel())
            for shares, chunks in staging.sharded_chunks(flat, counts, chunk_bytes):
                self.run_chunks(replace(op, shares=shares), chunks, choice, window_kind)
        elif (offset := self._shared_offset(flat)) is not None:
            self._run_shared_storage(op, flat, choice, offset)
        else:
            self.run_chunks(op, list(staging.chunks(flat, chunk_bytes)), choice, window_kind)
        copy_back(flat, tensor)

    def run_chunks(
        self, op: CollectiveOp, chunks: Sequence[StagedChunk], choice: AlgorithmChoice, window_kind: str
    ) -> None:
        """Run a collective chunk by chunk; the next chunk is staged while peers read this one."""
        slots = self._staging.get(window_kind, self._chunk_bytes(op, window_kind))
        executor, compiler = self._executors[window_kind], self._programs.compiler(op, choice)
        may_be_direct = op.collective in (Collective.ALL_REDUCE, Collective.ALL_GATHER) and executor.maps_peers

        def fill(index: int) -> None:
            """Stage a whole chunk, or for a direct program only what peers read before it is reduced."""
            chunk, program = chunks[index], compiler.program(chunks[index].count)
            chunk.fill_slot(slots[index % len(slots)], op.dtype, program.direct if may_be_direct else None)

        fill(0)
        for index, chunk in enumerate(chunks):
            slot, program = slots[index % len(slots)], compiler.program(chunk.count)
            call = CallSignature.of(op, chunk.count, choice)
            meanwhile = partial(fill, index + 1) if index + 1 < len(chunks) else None
            outside = chunk.outside if program.direct is not None and may_be_direct else None
            release = executor.run(call, program, slot.offset, meanwhile, outside)
            if outside is None:
                chunk.drain(slot.tensor(op.dtype, chunk.count))
            slot.add_readers(partial(self._sync.wait_released, release))
        # The next call may come from another stream and fill the same slots.
        executor.synchronize()

    def _run_shared_storage(self, op: CollectiveOp, flat: torch.Tensor, choice: AlgorithmChoice, offset: int) -> None:
        """Run in place, in the same chunks as staged ranks do: each rank decides for its own side."""
        executor, compiler, size = self._executors["host"], self._programs.compiler(op, choice), flat.element_size()
        step = self._chunk_bytes(op, "host") // size
        release: Release = ()
        for start in range(0, flat.numel(), step):
            chunk = flat[start : start + step]
            call = CallSignature.of(op, chunk.numel(), choice)
            release = executor.run(call, compiler.program(chunk.numel()), offset + start * size, within=chunk)
        self._sync.wait_released(release)  # readers that released the last chunk have released all

    def _shared_offset(self, flat: torch.Tensor) -> int | None:
        """Return where peers find a tensor whose storage is shared, or None if it is not."""
        is_on_host = self.window_kind(flat) == "host" and not flat.is_cuda
        window = self._arenas["host"].window if is_on_host else None
        if not isinstance(window, MemfdWindow):
            return None
        first = window.storages.offset_of(flat.untyped_storage())
        return None if first is None else first + int(flat.storage_offset()) * flat.element_size()

    def _chunk_bytes(self, op: CollectiveOp, window_kind: str) -> int:
        """Return how much of a tensor outside the arena is worked on at a time; the same on all ranks."""
        # Where some ranks have GPUs, whose autograd has threads of its own, not all ranks see that it is a bucket.
        is_bucket = op.is_bucket and window_kind == "host" and not self._has_mixed_devices
        return staging.BUCKET_CHUNK_BYTES if is_bucket else staging.CHUNK_BYTES[window_kind]
