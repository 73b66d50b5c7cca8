"""The guard of one member: a process that starts it, and that stays until nothing of its tree is left.

Those below the guard who lose their parent become its children, whatever session they made for themselves, so nobody
leaves the tree. When the keeper dies, the guard is told by the kernel and kills the tree. When the guard dies, the
kernel kills the member, and the rest falls to the keeper.
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
from mimatrix.processes.proc import ENDS, Identity, adopt_orphans, descendants, die_with_parent, fork, identify, send

NOW = signal.SIGUSR1
"""To guards and keepers: kill at once. The other signals to end are for ending with a grace."""
_HEARD = (*ENDS, NOW, signal.SIGCHLD)
_AGAIN_S, _GIVE_UP_S = 0.02, 5.0
_LONGEST_WAIT_S = 3600.0


@dataclass(frozen=True, slots=True)
class Charge:
    """Whom to guard: what to start, with which whole environment, where, and as whom."""

    words: tuple[str, ...]
    environment: Mapping[str, str]
    folder: Path
    grace_s: float
    account: Account | None


class Kind(StrEnum):
    """What a guard reports."""

    STARTED = "started"
    REFUSED = "refused"
    """The member cannot be started; `text` says why."""
    ENDED = "ended"
    """The member itself has, with `code`; what it leaves is being ended."""
    LEFT = "left"
    """Some of the tree cannot be killed; `text` says who."""


@dataclass(frozen=True, slots=True)
class Report:
    """One line from a guard to its keeper."""

    kind: Kind
    at_s: float
    """On the clock that all processes of the machine share."""
    code: int = 0
    text: str = ""


@dataclass(frozen=True, slots=True)
class Post:
    """A guard at work: what its member prints comes out of `output`; `reports` ends when the guard does."""

    guard: Identity
    output: int
    reports: int


def start_guard(charge: Charge) -> Post:
    """Start a guard, which starts its member. To be called by the thread that lives as long as the keeper does."""
    keeper = os.getpid()
    output, prints = os.pipe()
    reports, says = os.pipe()

    def act() -> None:
        adopt_orphans()
        die_with_parent(NOW)
        if os.getppid() == keeper:
            _Guard(charge, says).run(prints)

    pid = fork(act, [prints, says], _HEARD)
    os.close(prints)
    os.close(says)
    os.set_blocking(output, False)
    guard = identify(pid)
    assert guard, "nobody has waited for it, so it is there even if it has ended"
    return Post(guard, output, reports)


def read_reports(data: bytes) -> list[Report]:
    """The lines that came out of a post. Each was written at once and is short, so that none comes in pieces."""
    return [Report(**told | {"kind": Kind(told["kind"])}) for told in map(json.loads, data.splitlines())]


class _Guard:
    """The tree of one member, and when what is left of it is to be killed."""

    def __init__(self, charge: Charge, says: int) -> None:
        self._charge = charge
        self._says = says
        # Kept for its number alone: whoever asks it for more would take exit codes that are waited for here.
        self._member: subprocess.Popen[bytes] | None = None
        self._is_over = False
        self._told: set[Identity] = set()
        self._kill_at_s = self._give_up_at_s = math.inf

    def run(self, prints: int) -> None:
        """Start the member, and end when nothing of its tree is left, or when that cannot be had."""
        try:
            self._member = _start(self._charge, prints)
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            self._report(Kind.REFUSED, text=str(error))
            return
        os.close(prints)
        self._report(Kind.STARTED)
        while self._reap():
            if time.monotonic() > self._give_up_at_s:
                left = " ".join(str(who.pid) for who in descendants(os.getpid()))
                self._report(Kind.LEFT, text=f"processes that cannot be killed are left: {left}")
                return
            self._turn()

    def _reap(self) -> bool:
        """Note who has ended, and end what the member has left. Whether anybody is there."""
        had_ended = self._is_over
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    break
                if self._member and pid == self._member.pid:
                    self._is_over = True
                    self._report(Kind.ENDED, code=os.waitstatus_to_exitcode(status))
            if self._is_over and not had_ended:
                self._tell_to_end()
            return True
        return False

    def _turn(self) -> None:
        """Wait for a signal, or until it is time to kill."""
        patience_s = min(_LONGEST_WAIT_S, max(0.0, self._kill_at_s - time.monotonic()))
        heard = signal.sigtimedwait(_HEARD, patience_s)
        if heard and heard.si_signo in ENDS:
            self._tell_to_end()
        if (heard and heard.si_signo == NOW) or time.monotonic() >= self._kill_at_s:
            self._kill()

    def _tell_to_end(self) -> None:
        """Once to each: a second SIGTERM makes some give up what the first made them begin."""
        for who in descendants(os.getpid()):
            if who not in self._told:
                self._told.add(who)
                _try_to_send(who, signal.SIGTERM)
        self._kill_at_s = min(self._kill_at_s, time.monotonic() + self._charge.grace_s)

    def _kill(self) -> None:
        """Kill all, and soon again, for those who were born meanwhile."""
        for who in descendants(os.getpid()):
            _try_to_send(who, signal.SIGKILL)
        now_s = time.monotonic()
        self._kill_at_s = now_s + _AGAIN_S
        self._give_up_at_s = min(self._give_up_at_s, now_s + _GIVE_UP_S)

    def _report(self, kind: Kind, code: int = 0, text: str = "") -> None:
        report = Report(kind, time.monotonic(), code, text[:1000])
        with suppress(BrokenPipeError):  # the keeper is gone; we are told to kill then
            os.write(self._says, json.dumps(asdict(report)).encode() + b"\n")


def _start(charge: Charge, prints: int) -> "subprocess.Popen[bytes]":
    environment, handed = _without_token(charge.environment)
    try:
        return subprocess.Popen(  # noqa: S603 (running what the person asks for is the purpose)
            charge.words,
            env=environment,
            cwd=charge.folder,
            stdin=subprocess.DEVNULL,
            stdout=prints,
            stderr=prints,
            pass_fds=handed,
            start_new_session=True,
            preexec_fn=_Entry(charge.account, os.getpid()),
        )
    finally:
        for descriptor in handed:
            os.close(descriptor)


def _without_token(environment: Mapping[str, str]) -> tuple[dict[str, str], tuple[int, ...]]:
    """Move the token into a pipe that the member inherits, since /proc shows environments to all of the same user."""
    shown = dict(environment)
    token = shown.pop(TOKEN.name, "")
    if not token:
        return shown, ()
    reads, writes = os.pipe()
    os.write(writes, token.encode())
    os.close(writes)
    return shown | {TOKEN_FD.name: str(reads)}, (reads,)


@dataclass(frozen=True, slots=True)
class _Entry:
    """What a member does before it becomes its command."""

    account: Account | None
    parent: int

    def __call__(self) -> None:
        if self.account:
            self.account.become()
        die_with_parent()  # a change of user would undo it, so it comes after
        if os.getppid() != self.parent:
            os._exit(1)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _try_to_send(who: Identity, number: signal.Signals) -> None:
    with suppress(PermissionError):  # it became another user's, by sudo for one
        send(who, number)
