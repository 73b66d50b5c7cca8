"""The calls of a group that NCCL carries: launched on the calling thread, logged, counted and watched.

So every rank launches in the order of its program. The host does not wait; the watchdog notices a rank that is lost.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from mimatrix.comm.c10d import Launcher
from mimatrix.comm.calls import CallCounters, CallSignature, CollectiveOp
from mimatrix.comm.dispatch import Dispatcher
from mimatrix.comm.nccl_launcher import NcclLauncher
from mimatrix.comm.out_of_place import OutOfPlace
from mimatrix.comm.tuning.choice import AlgorithmChoice
from mimatrix.comm.work import CallerStreamWork, StreamTask, StreamWork

_MAX_KNOWN = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class _KnownLaunch:
    """How NCCL carries a call that was made before."""

    launch: Launcher
    carrier: str
    signature: CallSignature
    doing: str


class LaunchedCalls:
    """The launched calls of one group; `watch` raises if a rank of the group was lost."""

    def __init__(
        self,
        group: str,
        dispatcher: Dispatcher,
        nccl: NcclLauncher,
        counters: CallCounters,
        watch: Callable[[str], None],
    ) -> None:
        self._group, self._dispatcher, self._nccl = group, dispatcher, nccl
        self._log, self._counters, self._watch = dispatcher.launch_log, counters, watch
        self._watchdog, self._caller = dispatcher.endpoint.watchdog, dispatcher.endpoint.control.caller
        self._known: dict[tuple[CollectiveOp, int, int, bool], _KnownLaunch] = {}

    def start_known(self, op: CollectiveOp, *tensors: torch.Tensor, is_async: bool) -> dist.Work | None:
        """Launch a call of a kind that was launched before; None if it was not, so that `start` finds out how.

        For calls that torch makes: the fewer steps, the better. `tensors` are one, or the full tensor and the shard.
        Without `is_async` the caller's stream runs the call.
        """
        tensor = tensors[0]
        known = self._known.get((op, tensor.numel(), len(tensors), is_async))
        if known is None or tensor.device.type != self._nccl.device_type or not tensor.is_contiguous():
            return None
        self._watchdog.check(self._group, known.doing)
        self._counters.add(op.collective, known.carrier, tensor.nbytes)
        number = self._log.add(known.signature, self._caller.of_this_thread())
        try:
            task = CallerStreamWork.unless(known.launch(*tensors), tensor)
        except RuntimeError as error:
            self._dispatcher.explain(known.doing, error)
            raise
        self._note(number, known.doing, task)
        return task

    def start(self, op: CollectiveOp, tensor: torch.Tensor, choice: AlgorithmChoice) -> StreamWork:
        """Launch a collective in place on a tensor."""
        self._remember(op, tensor, choice, tensors=1)
        return self._start(op, tensor, choice, partial(self._nccl.launch, op, tensor, choice))

    def start_into(self, call: OutOfPlace, choice: AlgorithmChoice) -> StreamWork:
        """Launch a collective between two tensors."""
        self._remember(call.op, call.full, choice, tensors=2)
        return self._start(call.op, call.full, choice, partial(self._nccl.launch_into, call, choice))

    def start_native(self, launch: Callable[[], dist.Work | None], tensor: torch.Tensor, *, doing: str) -> StreamWork:
        """Launch a call of NCCL that is not one of our collectives; it is not compared with those of other ranks."""
        self._watchdog.check(self._group, doing)
        return self._start_watched(lambda: CallerStreamWork.unless(launch(), tensor), self._log.number, doing)

    def _start(
        self, op: CollectiveOp, tensor: torch.Tensor, choice: AlgorithmChoice, launch: Callable[[], StreamTask]
    ) -> StreamWork:
        count, doing = tensor.numel(), op.describe(tensor.numel())
        self._watchdog.check(self._group, doing)
        self._counters.add(op.collective, self._dispatcher.carrier(choice, tensor), tensor.nbytes)
        number = self._log.add(CallSignature.of(op, count, ""), self._caller.of_this_thread())
        return self._start_watched(partial(self._dispatcher.guarded, doing, launch), number, doing)

    def _start_watched(self, launch: Callable[[], StreamTask], number: int, doing: str) -> StreamWork:
        work = StreamWork(launch, partial(self._watch, doing))
        work.run()
        if work.launched:
            self._note(number, doing, work.launched)
        return work

    def _note(self, number: int, doing: str, task: StreamTask) -> None:
        """Have the watchdog watch a call, unless a CUDA graph captures it: it runs later, and often."""
        if self._nccl.device_type != "cuda" or not torch.cuda.is_current_stream_capturing():
            self._watchdog.note(self._group, number, doing, task)

    def _remember(self, op: CollectiveOp, tensor: torch.Tensor, choice: AlgorithmChoice, *, tensors: int) -> None:
        """Remember how such calls are launched, unless windows may carry one on another tensor of the same size."""
        if (op, tensor.numel(), tensors, True) in self._known or self._dispatcher.windows.window_kinds:
            return
        for is_async in (True, False):
            launch = self._nccl.launcher(op, choice, is_out_of_place=tensors == 2, is_async=is_async)
            if launch is None:
                return
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            self._known[op, tensor.numel(), tensors, is_async] = _KnownLaunch(
                launch=launch,
                carrier=self._dispatcher.carrier(choice, tensor),
                signature=CallSignature.of(op, tensor.numel(), ""),
                doing=op.describe(tensor.numel()),
            )
