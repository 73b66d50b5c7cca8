"""The executor on NCCL's messages: runs a program by groups of sends and receives that the GPU puts in order."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from mimatrix.comm.calls import CallSignature
from mimatrix.comm.execution.program import Program, ProgramStep, Read
from mimatrix.comm.execution.reduce import reduce_into

_TAG = 0
"""NCCL has no tags: messages between two ranks arrive in the order in which they are sent."""


class GroupedPointToPoint(Protocol):
    """What is needed of a c10d backend."""

    def _start_coalescing(self) -> None: ...

    def _end_coalescing(self) -> Any: ...

    def send(self, tensors: list[torch.Tensor], dstRank: int, tag: int) -> Any:  # noqa: N803 (torch's name)
        """Start to send, or add it to the group."""
        ...

    def recv(self, tensors: list[torch.Tensor], srcRank: int, tag: int) -> Any:  # noqa: N803 (torch's name)
        """Start to receive, or add it to the group."""
        ...


class GroupedSendRecvExecutor:
    """Runs programs for one rank of one group, on the current stream. The host waits for nothing.

    Messages are bytes: NCCL does not know all types that we reduce.
    """

    def __init__(self, backend: GroupedPointToPoint, world_size: int) -> None:
        self._backend, self._world_size = backend, world_size

    def run(self, call: CallSignature, program: Program, flat: torch.Tensor) -> None:
        """Run a program in place on `flat`, which holds this rank's data: one group of messages for each round."""
        for step in program.steps:
            addends = self._exchange(step, flat)
            for read, sources in addends:
                divisor = self._world_size if read.completes and call.reduce_op == "avg" else 1
                reduce_into(flat[read.start : read.stop], sources, call.reduce_op, divisor)

    def _exchange(self, step: ProgramStep, flat: torch.Tensor) -> Sequence[tuple[Read, list[torch.Tensor]]]:
        """Send and receive what a round moves; return what is to be added, with the read that it is for."""
        addends: list[tuple[Read, list[torch.Tensor]]] = []
        if not step.reads and not step.serves:
            return addends
        self._backend._start_coalescing()
        for read in step.reads:
            inside = flat[read.start : read.stop]
            targets = [torch.empty_like(inside) if read.adds else inside for _ in read.sources]
            for source, target in zip(read.sources, targets, strict=True):
                self._backend.recv([target.view(torch.uint8)], source, _TAG)
            if read.adds:
                addends.append((read, targets))
        for serve in step.serves:
            self._backend.send([flat[serve.start : serve.stop].view(torch.uint8)], serve.peer, _TAG)
        self._backend._end_coalescing().wait()
        return addends
