"""The reaper of one member: a process that starts it, and that stays until nothing of its process tree is left.

Processes below the reaper that lose their parent become its children, whatever session they made for themselves, so
none leaves the tree. When the supervisor dies, the kernel signals the reaper, which kills the tree. When the reaper
dies, the kernel kills the member, and the supervisor kills the rest.
"""

import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from mimatrix.core.environment import TOKEN, TOKEN_FD
from mimatrix.launch.local.users import Account
from mimatrix.launch.start_failure import is_transient
from mimatrix.processes.proc import (
    TERMINATION_SIGNALS,
    ChildSetup,
    ProcessId,
    adopt_orphans,
    descendants,
    die_with_parent,
    fork,
    identify,
    send,
)

KILL_NOW = signal.SIGUSR1
"""To reapers and supervisors: kill at once. The termination signals are for ending with a grace period."""
_HANDLED = (*TERMINATION_SIGNALS, KILL_NOW, signal.SIGCHLD)
_RETRY_S, _GIVE_UP_S = 0.02, 5.0
_LONGEST_WAIT_S = 3600.0
_DETAIL_CHARACTERS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """A member to start."""

    command: tuple[str, ...]
    environment: Mapping[str, str]
    """Its whole environment."""
    folder: Path
    """Its working directory."""
    grace_s: float
    account: Account | None


class ReaperEventKind(StrEnum):
    """What a reaper reports."""

    STARTED = "started"
    REFUSED = "refused"
    """The member cannot be started; `detail` says why."""
    ENDED = "ended"
    """The member itself has ended, with `code`; the processes that it left are being ended."""
    LEFT_OVER = "left_over"
    """Some processes of the tree cannot be killed; `detail` says which."""


@dataclass(frozen=True, slots=True)
class ReaperEvent:
    """One message from a reaper to its supervisor."""

    kind: ReaperEventKind
    at_s: float
    """On the clock that all processes of the machine share."""
    code: int = 0
    detail: str = ""
    is_transient: bool = False
    """Whether a refused member may well start a little later."""


@dataclass(frozen=True, slots=True)
class ReaperHandle:
    """A reaper at work: `output` is what its member prints; `events` ends when the reaper does."""

    reaper: ProcessId
    output: int
    events: int


def start_reaper(spec: ProcessSpec) -> ReaperHandle:
    """Start a reaper, which starts its member. The thread that calls this must live as long as the supervisor."""
    supervisor = os.getpid()
    output, prints = os.pipe()
    events, sender = os.pipe()

    def act() -> None:
        adopt_orphans()
        die_with_parent(KILL_NOW)
        if os.getppid() == supervisor:
            _Reaper(spec, sender).run(prints)

    pid = fork(act, [prints, sender], _HANDLED)
    os.close(prints)
    os.close(sender)
    os.set_blocking(output, False)
    reaper = identify(pid)
    assert reaper, "it was not waited for, so it is there even if it has ended"
    return ReaperHandle(reaper, output, events)


def read_events(data: bytes) -> list[ReaperEvent]:
    """Return the events in what a reaper wrote. Each was written at once and is short, so that none is split."""
    return [
        ReaperEvent(**{**fields, "kind": ReaperEventKind(fields["kind"])})
        for fields in map(json.loads, data.splitlines())
    ]


class _Reaper:
    """The process tree of one member, and when what is left of it is to be killed."""

    def __init__(self, spec: ProcessSpec, sender: int) -> None:
        self._spec = spec
        self._sender = sender
        # Kept for its number alone: any other use would take exit codes that are waited for here.
        self._member: subprocess.Popen[bytes] | None = None
        self._has_ended = False
        self._told: set[ProcessId] = set()
        self._kill_at_s = self._give_up_at_s = math.inf

    def run(self, prints: int) -> None:
        """Start the member, and return when nothing of its tree is left, or when it cannot be killed."""
        try:
            self._member = _start(self._spec, prints)
        except (OSError, ValueError, MemoryError, subprocess.SubprocessError) as error:
            self._report(ReaperEventKind.REFUSED, detail=str(error), is_transient=is_transient(error))
            return
        os.close(prints)
        self._report(ReaperEventKind.STARTED)
        while self._reap():
            if time.monotonic() > self._give_up_at_s:
                left = " ".join(str(process.pid) for process in descendants(os.getpid()))
                self._report(ReaperEventKind.LEFT_OVER, detail=f"processes that cannot be killed are left: {left}")
                return
            self._step()

    def _reap(self) -> bool:
        """Take exit codes, and end what the member has left. Return whether any process is left."""
        had_ended = self._has_ended
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                if self._member and pid == self._member.pid:
                    self._has_ended = True
                    self._report(ReaperEventKind.ENDED, code=os.waitstatus_to_exitcode(status))
            if self._has_ended and not had_ended:
                self._terminate()
            return True
        return False

    def _step(self) -> None:
        """Wait for a signal, or until it is time to kill."""
        patience_s = min(_LONGEST_WAIT_S, max(0.0, self._kill_at_s - time.monotonic()))
        received = signal.sigtimedwait(_HANDLED, patience_s)
        if received and received.si_signo in TERMINATION_SIGNALS:
            self._terminate()
        if (received and received.si_signo == KILL_NOW) or time.monotonic() >= self._kill_at_s:
            self._kill()

    def _terminate(self) -> None:
        """Send SIGTERM once to each process: at a second one some give up what the first made them begin."""
        for process in descendants(os.getpid()):
            if process not in self._told:
                self._told.add(process)
                _try_to_send(process, signal.SIGTERM)
        self._kill_at_s = min(self._kill_at_s, time.monotonic() + self._spec.grace_s)

    def _kill(self) -> None:
        """Kill all, and soon again, for processes that were born meanwhile."""
        for process in descendants(os.getpid()):
            _try_to_send(process, signal.SIGKILL)
        now_s = time.monotonic()
        self._kill_at_s = now_s + _RETRY_S
        self._give_up_at_s = min(self._give_up_at_s, now_s + _GIVE_UP_S)

    def _report(self, kind: ReaperEventKind, code: int = 0, detail: str = "", is_transient: bool = False) -> None:
        event = ReaperEvent(kind, time.monotonic(), code, detail[:_DETAIL_CHARACTERS], is_transient)
        with suppress(BrokenPipeError):  # the supervisor is gone, and the kernel tells us to kill
            os.write(self._sender, json.dumps(asdict(event)).encode() + b"\n")


def _start(spec: ProcessSpec, prints: int) -> "subprocess.Popen[bytes]":
    environment, inherited = _move_token(spec.environment)
    try:
        return subprocess.Popen(  # noqa: S603 (running what the person asks for is the purpose)
            spec.command,
            env=environment,
            cwd=spec.folder,
            stdin=subprocess.DEVNULL,
            stdout=prints,
            stderr=prints,
            pass_fds=inherited,
            start_new_session=True,
            preexec_fn=ChildSetup(os.getpid(), become=spec.account.become if spec.account else None),
        )
    finally:
        for descriptor in inherited:
            os.close(descriptor)


def _move_token(environment: Mapping[str, str]) -> tuple[dict[str, str], tuple[int, ...]]:
    """Move the token into a pipe that the member inherits: /proc shows environments to all processes of its user."""
    shown = dict(environment)
    token = shown.pop(TOKEN.name, "")
    if not token:
        return shown, ()
    receiver, sender = os.pipe()
    os.write(sender, token.encode())
    os.close(sender)
    return shown | {TOKEN_FD.name: str(receiver)}, (receiver,)


def _try_to_send(process: ProcessId, number: signal.Signals) -> None:
    with suppress(PermissionError):  # it became another user's, e.g. by sudo
        send(process, number)
