"""How NCCL carries one call: by its own collective, or by our schedule as groups of its messages.

Calls are launched, not run: they begin after what the caller has launched so far, and the host waits for nothing.
"""

from collections.abc import Callable
from functools import partial

import torch

from mimatrix.comm.c10d import C10dBackend, Launcher
from mimatrix.comm.calls import SHARDED, CallSignature, CollectiveOp
from mimatrix.comm.execution.grouped_send_recv import GroupedSendRecvExecutor
from mimatrix.comm.execution.staging import copy_back
from mimatrix.comm.out_of_place import OutOfPlace
from mimatrix.comm.program_cache import ProgramCache
from mimatrix.comm.tuning.choice import C10D, PADDED, AlgorithmChoice
from mimatrix.comm.work import SideStreamTask, StreamTask


class NcclLauncher:
    """Launches collectives of one group on tensors of one kind of device, GPUs unless a test says otherwise."""

    def __init__(self, backend: C10dBackend, device_type: str, programs: ProgramCache, world_size: int) -> None:
        self.backend, self.device_type = backend, device_type
        self._programs, self._world_size = programs, world_size
        self._grouped = GroupedSendRecvExecutor(backend.backend, world_size)

    def carries(self, tensor: torch.Tensor, choice: AlgorithmChoice) -> bool:
        """Return whether a call on a tensor, by this choice, is launched here."""
        return tensor.device.type == self.device_type and choice.transport in ("c10d", "send_recv")

    def launcher(
        self, op: CollectiveOp, choice: AlgorithmChoice, *, is_out_of_place: bool, is_async: bool
    ) -> Launcher | None:
        """Return what launches all calls of a kind at once; None if they need more than one step."""
        if choice != C10D or (op.collective in SHARDED and not is_out_of_place):
            return None
        return self.backend.launcher(op.collective, op.dtype, op.reduce_op, op.root, is_async=is_async)

    def launch(self, op: CollectiveOp, tensor: torch.Tensor, choice: AlgorithmChoice) -> StreamTask:
        """Launch a collective in place on a tensor."""
        if choice.transport == "send_recv":
            return _on_side_stream(partial(self._exchange, op, choice), tensor)
        counts, way = op.shard_counts(tensor.numel(), self._world_size), choice.way
        has_average = op.reduce_op != "avg" or tensor.is_floating_point()
        if tensor.is_contiguous() and choice != PADDED and has_average:
            flat = tensor.view(-1)
            return self.backend.launch(op.collective, flat, op.reduce_op, op.root, counts, way)[0]

        def run(flat: torch.Tensor) -> None:
            self.backend.run(op.collective, flat, op.reduce_op, op.root, counts, way)

        return _on_side_stream(run, tensor)

    def launch_into(self, call: OutOfPlace, choice: AlgorithmChoice) -> StreamTask:
        """Launch a collective between two tensors."""
        if choice.transport == "send_recv":
            on_full = partial(self._exchange, call.op, choice)
            return SideStreamTask(partial(call.run_in_place, on_full), call.output)
        if call.op.reduce_op != "avg" or call.full.is_floating_point():
            return call.launch_c10d(self.backend)[0]

        def run() -> None:
            work, finish = call.launch_c10d(self.backend)
            work.wait()
            if finish:
                finish()

        return SideStreamTask(run, call.output)

    def _exchange(self, op: CollectiveOp, choice: AlgorithmChoice, flat: torch.Tensor) -> None:
        call = CallSignature.of(op, flat.numel(), choice)
        self._grouped.run(call, self._programs.program(op, choice, flat.numel()), flat)


def _on_side_stream(run: Callable[[torch.Tensor], None], tensor: torch.Tensor) -> SideStreamTask:
    """Run what works in place on a flat tensor, for a tensor of any layout."""

    def run_flat() -> None:
        flat = tensor.reshape(-1).contiguous()
        run(flat)
        copy_back(flat, tensor)

    return SideStreamTask(run_flat, tensor)
