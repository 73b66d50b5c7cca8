"""The calls of a group that run on its thread, in order: queued, counted, logged, compared and watched."""

import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from mimatrix.comm.calls import CallCounters, CallSignature, CollectiveOp
from mimatrix.comm.control.unfinished_calls import begun_name
from mimatrix.comm.control.user_calls import UserCall
from mimatrix.comm.dispatch import Dispatcher
from mimatrix.comm.tuning.choice import C10D, AlgorithmChoice
from mimatrix.comm.work import CollectiveThread, Task, Work, with_side_stream
from mimatrix.core.errors import MiMatrixError, UserError

_REPORT_AFTER_S = 1.0
"""After how long a thread that waits tells the coordinator which calls it has made."""
_CLOSE_S = 5.0
"""How long to wait for calls that are queued when a group is closed."""
_MAX_KNOWN = 4096


class _AgreedCalls:
    """Kinds of calls that all ranks are known to make alike; all have the same set, as they make the same calls."""

    def __init__(self) -> None:
        self._seen: set[tuple[CollectiveOp, int]] = set()

    def is_new(self, op: CollectiveOp, count: int) -> bool:
        """Return whether a call is the first of its kind, and remember it."""
        # Ranks with GPUs, whose autograd has threads of its own, do not see that a tensor is a bucket.
        kind = (replace(op, is_bucket=False) if op.is_bucket else op), count
        if kind in self._seen:
            return False
        if len(self._seen) >= _MAX_KNOWN:
            self._seen.clear()
        self._seen.add(kind)
        return True


@dataclass(slots=True)
class WatchedCall:
    """A call that a thread waits for: the user's call, since when, and its number in the log."""

    user_call: UserCall | None
    since_s: float = field(default_factory=time.monotonic)
    number: int = 0
    """0 until it is logged, and for good over windows, which say themselves for whom they wait."""


class QueuedCalls:
    """The thread on which a group's calls run, and what is known of those that have begun."""

    def __init__(self, group: str, dispatcher: Dispatcher, thread: CollectiveThread, counters: CallCounters) -> None:
        self._group, self._dispatcher, self._counters = group, dispatcher, counters
        self.thread, self._owns_thread = thread, False
        self._endpoint, self._members, self._sync = dispatcher.endpoint, dispatcher.members, dispatcher.sync
        self._world_size, self._caller = dispatcher.world_size, self._endpoint.control.caller
        self._agreed, self._agreed_launches = _AgreedCalls(), _AgreedCalls()

    def use_own_thread(self) -> None:
        """Run this group's collectives on a thread of their own, so that they wait for no other group's."""
        self.thread, self._owns_thread = CollectiveThread().start(), True
        self._endpoint.threads.append(self.thread)

    def submit(
        self,
        task: Task,
        tensor: torch.Tensor | None = None,
        *,
        doing: str,
        inline: bool,
        watched: WatchedCall | None = None,
    ) -> Work:
        """Run a task in the order of this group's collectives.

        Args:
            task: What to run.
            tensor: If it is on a GPU, the task runs after the kernels that the caller has launched so far.
            doing: What the task is, for errors about lost ranks.
            inline: Run it on the calling thread if nothing else is queued.
            watched: What those who wait for it know of it.
        """
        user_call = self._caller.of_this_thread()

        def run() -> None:
            self._sync.user_call = user_call
            task()

        ordered = run if tensor is None else with_side_stream(run, tensor)
        work = Work(ordered, partial(self.watch, doing, watched or WatchedCall(user_call)))
        self.thread.submit(work, inline=inline)
        return work

    def watch(self, doing: str, call: WatchedCall | None = None) -> None:
        """Say that the calling thread waits for this group, and raise if a rank was lost or cannot come."""
        control = self._endpoint.control
        control.note_waiting(self._group)
        if call and time.monotonic() - call.since_s > _REPORT_AFTER_S:
            self._dispatcher.calls.report()
        if call and call.number:
            # c10d does not say for whom it waits: for all who have not made the call.
            name = begun_name(self._group)
            others = [rank for rank in self._members if rank != self._endpoint.rank]
            control.expect_arrival(name, call.number, others, call.user_call)
            control.note_waiting(name)
        control.check(-1, self._members, doing)

    def begin(self, op: CollectiveOp, tensor: torch.Tensor, choice: AlgorithmChoice, watched: WatchedCall) -> None:
        """Count a call that is about to run, and log it unless windows carry it; only on the group's thread.

        Not when it is submitted: whether windows carry it may not be known yet then, on one rank and not on another,
        and ranks must number their calls alike.
        """
        count = tensor.numel()
        self._counters.add(op.collective, self._dispatcher.carrier(choice, tensor), tensor.nbytes)
        if self._world_size == 1 or choice.transport == "windows":
            return
        if self._endpoint.control.has_news:
            self._endpoint.control.check(-1, self._members, op.describe(count))
        watched.number = self._dispatcher.calls.add(CallSignature.of(op, count, ""), watched.user_call)
        # Gloo ends a process if sizes differ. Calls of a kind that was compared before are compared by the log.
        if self._agreed.is_new(op, count):
            self._dispatcher.check_same_call(op, count, choice)

    def agree_to_launch(self, op: CollectiveOp, tensor: torch.Tensor) -> None:
        """Compare the first call of its kind with those of all members, before it is launched on the calling thread."""
        if self._agreed_launches.is_new(op, tensor.numel()):
            check = partial(self._dispatcher.check_same_call, op, tensor.numel(), C10D)
            self.submit(check, doing=op.describe(tensor.numel()), inline=False).wait()

    def close(self) -> None:
        """Close the dispatcher after the calls that are queued, and end the group's own thread."""
        try:
            closing = self.submit(self._dispatcher.close, doing="closing a group", inline=True)
        except UserError:  # its thread has ended, and with it all calls
            self._dispatcher.close()
        else:
            with suppress(MiMatrixError):  # a rank was lost, or calls take long: the slots are released after them
                closing.wait(_CLOSE_S)
        if self._owns_thread:
            self.thread.close()
