"""Processes that start together and end together, their lines told apart by a label in front.

Each one leads a process group of its own. When one fails, the others get `grace_s` to say what they miss, then SIGTERM,
then SIGKILL. When the one who runs them dies, they die: the kernel kills them, and a guard kills what they started.
Where they are told apart by teams, a failure ends its own team alone, which may then be started again.
"""

import os
import select
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, BinaryIO

from mimatrix.core.exit_codes import PEER_LOST, TIMED_OUT
from mimatrix.processes.proc import ENDS, die_with_parent

_KILL_S, _DRAIN_S = 5.0, 1.0
_LONGEST_LINE = 1 << 16
_SENTENCE = b"mimatrix: "
"""How an error of the user's begins."""


@dataclass(frozen=True, slots=True)
class Command:
    """One process: its label, its words, its whole environment, and a file to write `0` into before it starts."""

    label: str
    words: tuple[str, ...]
    environment: Mapping[str, str]
    joins: Path | None = None
    team: str = ""
    """Those of one team end together; all do where none is named."""


@dataclass(frozen=True, slots=True)
class Ending:
    """How it ended: the first exit code that is not zero, why in a few words, and whose, where a process failed."""

    code: int = 0
    reason: str = ""
    label: str = field(default="", compare=False)
    last_line: str = field(default="", compare=False)
    """The last that the process wrote to standard error."""


Beside = Callable[[Mapping[str, int]], AbstractContextManager[object]]
Again = Callable[[str, Ending], Sequence[Command]]


def _never(team: str, ending: Ending) -> Sequence[Command]:
    del team, ending
    return ()


@dataclass(frozen=True, slots=True)
class _Stop:
    """A signal to send to all that still run, and when."""

    at_s: float
    number: signal.Signals
    team: str = ""
    """To those of one team; of any without a name."""


def run_together(
    commands: Sequence[Command],
    out: BinaryIO,
    err: BinaryIO,
    *,
    grace_s: float = 10.0,
    timeout_s: float | None = None,
    beside: Beside = nullcontext,
    again: Again = _never,
) -> Ending:
    """Run all commands until all have ended; signals to end that reach us end them.

    `beside` gets their process groups by label; what it gives is entered when they have started and left before those
    that stay behind are killed. `again` is asked when a team has failed and ended while another one runs: what it gives
    is started in its place.
    """
    with _signals() as heard, _Crew(commands, out, err, grace_s, beside, again) as crew:
        return crew.watch(heard, timeout_s)


class _Crew:
    """The processes that run, what they print, and what is to be done about them next."""

    def __init__(
        self, commands: Sequence[Command], out: BinaryIO, err: BinaryIO, grace_s: float, beside: Beside, again: Again
    ) -> None:
        self._commands = commands
        self._beside, self._again = beside, again
        self._around = ExitStack()
        self._sinks = (out, err)
        self._grace_s = grace_s
        self._running: dict[int, tuple[subprocess.Popen[bytes], Command]] = {}
        self._groups: dict[int, str] = {}
        """Process groups, and the teams that they are of."""
        self._readers: set[_Lines] = set()
        self._errors: dict[str, _Lines] = {}
        """Standard error of each process, by label."""
        self._sentences: dict[bytes, bytes] = {}
        """Errors that were passed on once, each with the label of the first process that wrote it."""
        self._selector = selectors.DefaultSelector()
        self._stops: deque[_Stop] = deque()
        self._partial: list[_Stop] = []
        self._lost: dict[str, Ending] = {}
        """How teams ended that failed."""
        self._ending = Ending()
        self._guards: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "_Crew":
        try:
            self._start_all(self._commands)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._around.close()
        for group in self._groups:
            signal_group(group, signal.SIGKILL)
        with suppress(OSError):
            # Whoever reads our lines may have left.
            self._drain()
        for guard in self._guards:
            guard.kill()
            guard.communicate()
        for pidfd, (process, _command) in self._running.items():
            process.wait()
            os.close(pidfd)
        self._selector.close()

    def watch(self, heard: int, timeout_s: float | None) -> Ending:
        """Pass lines on until every process has ended; signals arrive on `heard`."""
        deadline = time.monotonic() + timeout_s if timeout_s is not None else None
        self._selector.register(heard, selectors.EVENT_READ)
        while self._running:
            self._turn(heard, deadline)
            if deadline is not None and time.monotonic() >= deadline:
                deadline = None
                self._trouble(Ending(TIMED_OUT, f"not done after {timeout_s:g} s"), 0.0)
        self._selector.unregister(heard)
        return self._ending if self._ending.code or not self._lost else self._without_the_lost()

    def _without_the_lost(self) -> Ending:
        """Well, where a team is left."""
        first, *more = self._lost.values()
        if {command.team for command in self._commands} <= self._lost.keys():
            return first
        return Ending(0, f"{', '.join(each.reason for each in (first, *more))}; the others went on")

    def _start_all(self, commands: Sequence[Command]) -> None:
        groups = {command.label: self._start(command) for command in commands}
        self._guards.append(start_guard(list(groups.values())))
        self._around.enter_context(self._beside(groups))

    def _start(self, command: Command) -> int:
        process = subprocess.Popen(  # noqa: S603 (running what the person asks for is the purpose)
            command.words,
            env=dict(command.environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_Entry(command.joins, os.getpid()),
        )
        pidfd = os.pidfd_open(process.pid)
        self._running[pidfd] = process, command
        self._groups[process.pid] = command.team
        self._selector.register(pidfd, selectors.EVENT_READ)
        for pipe, sink in zip((process.stdout, process.stderr), self._sinks, strict=True):
            assert pipe is not None
            lines = _Lines(pipe, sink, command.label, self._sentences if pipe is process.stderr else {})
            self._readers.add(lines)
            self._errors[command.label] = lines
            self._selector.register(pipe, selectors.EVENT_READ, lines)
        return process.pid

    def _turn(self, heard: int, deadline: float | None) -> None:
        """Wait for whatever is next, and deal with it."""
        moments = [stop.at_s for stop in [*list(self._stops)[:1], *self._partial]]
        moments += [] if deadline is None else [deadline]
        patience = max(0.0, min(moments) - time.monotonic()) if moments else None
        for key, _ in self._selector.select(patience):
            if isinstance(key.data, _Lines):
                self._read(key.data)
            elif key.fd == heard:
                number = os.read(heard, 1)[0]
                if number in ENDS:  # others may be heard here too, where somebody else minds them
                    self._trouble(Ending(128 + number, f"ended by {signal.Signals(number).name}"), 0.0)
            else:
                self._reap(key.fd)
        while self._stops and self._stops[0].at_s <= time.monotonic():
            self._stop(self._stops.popleft())
        due = [stop for stop in self._partial if stop.at_s <= time.monotonic()]
        self._partial = [stop for stop in self._partial if stop not in due]
        for stop in due:
            self._stop(stop)

    def _stop(self, stop: _Stop) -> None:
        for process, command in self._running.values():
            if not stop.team or command.team == stop.team:
                signal_group(process.pid, stop.number)

    def _read(self, lines: "_Lines") -> None:
        # All of it may have been read when its process ended, a moment ago.
        if lines in self._readers and not lines.pass_on():
            self._selector.unregister(lines.pipe)
            self._readers.discard(lines)
            lines.pipe.close()

    def _reap(self, pidfd: int) -> None:
        process, command = self._running.pop(pidfd)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        code = process.wait()
        if code:
            self._note_failure(self._describe(code, command.label), command.team)
        if command.team in self._lost and not self._ending.code:
            self._replace(command.team)

    def _note_failure(self, ending: Ending, team: str) -> None:
        """Keep the first failure, of all or of a team; one that followed from another one gives way to that."""
        if self._ending.code:
            if _follows(self._ending, ending):
                self._ending = ending
        elif not team:
            self._trouble(ending, self._grace_s)
        elif team not in self._lost:
            self._lost[team] = ending
            self._partial += _stops(self._grace_s, team)
        elif _follows(self._lost[team], ending):
            self._lost[team] = ending

    def _describe(self, code: int, label: str) -> Ending:
        """How a process ended, with the last line that it wrote."""
        lines = self._errors[label]
        while lines in self._readers and select.select([lines.pipe], [], [], 0)[0]:
            self._read(lines)
        how = f"with exit code {code}" if code > 0 else f"by {signal.Signals(-code).name}"
        return Ending(code if code > 0 else 128 - code, f"[{label}] ended {how}", label, lines.last_line)

    def _replace(self, team: str) -> None:
        """Start a lost team again once none of it is left, where another one still runs that it can come back to."""
        running = {command.team for _, command in self._running.values()}
        if team in running or running <= self._lost.keys():
            return
        commands = self._again(team, self._lost[team])
        if commands:
            del self._lost[team]
            for group in [group for group, whose in self._groups.items() if whose == team]:
                signal_group(group, signal.SIGKILL)
                del self._groups[group]
            self._partial = [stop for stop in self._partial if stop.team != team]
            self._start_all(commands)

    def _trouble(self, ending: Ending, grace_s: float) -> None:
        """The first trouble is the one that counts. Where the end was near already, another one makes it come now."""
        if not self._ending.code:
            self._ending = ending
        asked = len(self._stops) == 1
        self._stops = deque([_Stop(time.monotonic(), signal.SIGKILL)] if asked else _stops(grace_s))

    def _drain(self) -> None:
        """Pass on what is left in the pipes, for a moment: somebody unknown may still hold them open."""
        deadline = time.monotonic() + _DRAIN_S
        while self._readers and (patience := deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(patience):
                if isinstance(key.data, _Lines):
                    self._read(key.data)
        for lines in self._readers:
            lines.pipe.close()


def _follows(first: Ending, later: Ending) -> bool:
    """Whether the first one ended because of the later one: it only stopped as it had lost a peer."""
    killed = 128 + signal.SIGTERM, 128 + signal.SIGKILL
    return first.code == PEER_LOST and later.code not in (PEER_LOST, *killed)


def _stops(grace_s: float, team: str = "") -> list[_Stop]:
    now = time.monotonic()
    return [_Stop(now + grace_s, signal.SIGTERM, team), _Stop(now + grace_s + _KILL_S, signal.SIGKILL, team)]


class _Lines:
    """One stream of one process: whole lines go on, each with its label."""

    def __init__(self, pipe: IO[bytes], sink: BinaryIO, label: str, sentences: dict[bytes, bytes]) -> None:
        self.pipe = pipe
        self.last_line = ""
        self._sentences = sentences
        self._sink = sink
        self._label = f"[{label}] ".encode()
        self._rest = b""

    def pass_on(self) -> bool:
        """Take what has come; False at the end of the stream."""
        came = os.read(self.pipe.fileno(), _LONGEST_LINE)
        *whole, self._rest = (self._rest + came).split(b"\n")
        if self._rest and (not came or len(self._rest) >= _LONGEST_LINE):
            whole, self._rest = [*whole, self._rest], b""
        if last := next((line for line in reversed(whole) if line.strip()), b""):
            self.last_line = last.decode(errors="replace").strip()
        self._sink.write(b"".join(self._label + line + b"\n" for line in whole if not self._is_repeated(line)))
        self._sink.flush()
        return bool(came)

    def _is_repeated(self, line: bytes) -> bool:
        """Whether another process has written the same error, which all raise alike."""
        return line.startswith(_SENTENCE) and self._sentences.setdefault(line, self._label) != self._label


@dataclass(frozen=True, slots=True)
class _Entry:
    """What a child does before it becomes its command."""

    joins: Path | None
    parent: int

    def __call__(self) -> None:
        die_with_parent()
        if os.getppid() != self.parent:
            os._exit(1)
        if self.joins:
            self.joins.write_text("0")


def start_guard(groups: Sequence[int]) -> subprocess.Popen[bytes]:
    """A shell that waits for the end of its input, which comes when we die, and then kills the groups."""
    script = 'read -r _; kill -s KILL -- "$@"'
    return subprocess.Popen(  # noqa: S603
        ["sh", "-c", script, "guard", *(f"-{group}" for group in groups)],  # noqa: S607
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


@contextmanager
def _signals() -> Iterator[int]:
    """A pipe on which SIGINT, SIGTERM and SIGHUP arrive as bytes while this lasts; what `nohup` ignores stays so."""
    heard, told = os.pipe()
    os.set_blocking(told, False)
    wakeup = signal.set_wakeup_fd(told)
    minded = [number for number in ENDS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, _ignore) for number in minded}
    try:
        yield heard
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(wakeup)
        os.close(heard)
        os.close(told)


def _ignore(number: int, frame: FrameType | None) -> None:
    """The wakeup pipe has it."""


def signal_group(group: int, number: signal.Signals) -> None:
    """Send a signal to a process group, if any of it is left."""
    with suppress(ProcessLookupError):
        os.killpg(group, number)
