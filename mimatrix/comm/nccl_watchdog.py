"""Watches NCCL's collectives from a thread of its own: the host does not wait for them, so it misses a lost rank.

When a rank is lost, or does not come in time, the communicator is aborted: kernels that wait for the rank end, and
threads that wait for the GPU continue. The next call of the group raises the error, which names the rank.
"""

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

from mimatrix.comm.control.call_log import CallLog
from mimatrix.comm.control.client import ControlClient
from mimatrix.comm.work import StreamTask
from mimatrix.core.errors import MiMatrixError, UserError, WorldError

_POLL_S = 0.05
_REPORT_AFTER_S = 1.0
"""After how long a rank tells the coordinator which call it is in."""
_LEFT_S = 2.0
"""How long a collective may take to end after one of its ranks has left: it had no further part in it."""
_ABORT_S = 5.0
"""How long to wait for communicators to end."""

logger = logging.getLogger(__name__)


class AbortableBackend(Protocol):
    """What is needed of a c10d backend."""

    def abort(self) -> None:
        """End all collectives in flight; later ones fail."""
        ...


@dataclass(slots=True)
class _Pending:
    """The last call that a group has launched, complete or not."""

    number: int
    doing: str
    task: StreamTask
    since_s: float = field(default_factory=time.monotonic)
    left_since_s: float | None = None
    """Since when a rank of the group is known to have left."""
    is_completed: bool = False
    """Whether the GPU was seen to have completed it: it is not asked again, which would fail CUDA graph captures."""


@dataclass(slots=True, kw_only=True)
class _WatchedGroup:
    members: Sequence[int]
    backend: AbortableBackend
    calls: CallLog
    timeout_s: float
    pending: _Pending | None = None
    error: MiMatrixError | None = None
    aborting: threading.Thread | None = None


class NcclWatchdog:
    """The watchdog of one rank, for all its groups."""

    def __init__(self, control: ControlClient) -> None:
        self._control = control
        self._groups: dict[str, _WatchedGroup] = {}
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def has_groups(self) -> bool:
        """Whether a group is watched, that is, has communicators."""
        return bool(self._groups)

    def watch(
        self, name: str, members: Sequence[int], backend: AbortableBackend, calls: CallLog, timeout_s: float
    ) -> None:
        """Watch a group; the thread starts with the first."""
        with self._lock:
            self._groups[name] = _WatchedGroup(members=members, backend=backend, calls=calls, timeout_s=timeout_s)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mimatrix-nccl-watchdog", daemon=True)
                self._thread.start()

    def forget(self, name: str) -> None:
        """End watching a group."""
        with self._lock:
            self._groups.pop(name, None)

    def note(self, name: str, number: int, doing: str, task: StreamTask) -> None:
        """Note the call that a group has just launched; if it ends, so have all before it."""
        if group := self._groups.get(name):
            group.pending = _Pending(number, doing, task)

    def check(self, name: str, doing: str) -> None:
        """Raise if a rank of a group was lost, or a call of it has failed."""
        group = self._groups.get(name)
        if group is None:
            raise UserError("a collective was started after its group was closed; call run.close last")
        if group.error:
            raise group.error
        if self._control.has_news:
            self._control.check(-1, group.members, doing)

    def abort_all(self) -> None:
        """Abort the communicators of all groups: this process ends with an error, and must not wait for others."""
        self._abort(list(self._groups.values()))

    def close(self) -> None:
        """End the thread."""
        self._closing.set()
        if self._thread:
            self._thread.join(timeout=5)

    def _run(self) -> None:
        while not self._closing.wait(_POLL_S):
            with self._lock:
                groups = list(self._groups.items())
            for name, group in groups:
                try:
                    self._look_at(group)
                except Exception:
                    logger.exception("the watchdog of group %s failed", name)

    def _look_at(self, group: _WatchedGroup) -> None:
        pending = group.pending
        if pending is None or group.error:
            return
        try:
            # Also if the call is complete: c10d counts one as complete that has failed, and its kernel may still run.
            self._control.check(-1, group.members, pending.doing)
            pending.is_completed = pending.is_completed or _is_completed(pending.task)
            if not pending.is_completed:
                self._check_pending(group, pending)
        except MiMatrixError as error:
            group.error = error
            self._abort([group, *self._others_that_fail(group)])

    def _others_that_fail(self, group: _WatchedGroup) -> list[_WatchedGroup]:
        """Return the other groups that have lost a rank as well."""
        others = [other for other in list(self._groups.values()) if other is not group]
        return [other for other in others if self._control.failure(-1, other.members, "a collective")]

    def _abort(self, groups: Sequence[_WatchedGroup]) -> None:
        """Abort communicators at the same time: each waits for the GPU, on which kernels of the others run."""
        with self._lock:
            for group in groups:
                if group.aborting is None:  # two at once would free the same communicator twice
                    group.aborting = threading.Thread(target=_abort, args=(group.backend,), daemon=True)
                    group.aborting.start()
        until = time.monotonic() + _ABORT_S
        for group in groups:
            if group.aborting:
                group.aborting.join(max(0.0, until - time.monotonic()))

    def _check_pending(self, group: _WatchedGroup, pending: _Pending) -> None:
        """Raise if the pending call cannot end any more, or has taken too long."""
        now_s = time.monotonic()
        waited_s = now_s - pending.since_s
        for rank in filter(self._control.has_left, group.members):
            if pending.left_since_s is None:
                pending.left_since_s = now_s
            if now_s - pending.left_since_s > _LEFT_S:
                self._control.check(rank, group.members, pending.doing)
        if waited_s > _REPORT_AFTER_S:
            group.calls.report()
        if waited_s > group.timeout_s:
            self._control.report_unfinished(
                group.calls.group, pending.number, group.members, pending.doing, group.timeout_s
            )
            raise WorldError(
                f"{pending.doing} has not ended after {waited_s:.0f} s, although every rank has come; "
                "check the network between the hosts"
            )


def _abort(backend: AbortableBackend) -> None:
    with suppress(RuntimeError):  # it may be aborted already, or the GPU has failed
        backend.abort()


def _is_completed(task: StreamTask) -> bool:
    try:
        return task.is_completed()
    except RuntimeError:  # the GPU failed, or the communicator was aborted: the coordinator knows who was lost
        return False
