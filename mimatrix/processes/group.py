"""Run processes that start together and end together, with a label in front of each line that they print.

Each one leads a process group of its own. When one fails, the others get `grace_s` to say what they miss, then SIGTERM,
then SIGKILL. When the process that runs them dies, the kernel kills them, and a guard kills what they started.
If they form subgroups, a failure ends its own subgroup alone, which may then be restarted.
"""

import os
import select
import selectors
import signal
import subprocess
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from mimatrix.processes.group_exit import GroupExit
from mimatrix.processes.labeled_output import LabeledStream
from mimatrix.processes.proc import TERMINATION_SIGNALS, ChildSetup
from mimatrix.processes.signals import SignalPipe, heeded_termination_signals, open_signal_pipe

_KILL_S, _DRAIN_S = 5.0, 1.0


@dataclass(frozen=True, slots=True)
class Command:
    """One process of a group."""

    label: str
    argv: tuple[str, ...]
    environment: Mapping[str, str]
    """Its whole environment."""
    joins: Path | None = None
    """The `cgroup.procs` file of a control group to join before it starts."""
    subgroup: str = ""
    """Those of one subgroup end together; all do if none is named."""


Around = Callable[[Mapping[str, int]], AbstractContextManager[object]]
Restart = Callable[[str, GroupExit], Sequence[Command]]


def _never(subgroup: str, reason: GroupExit) -> Sequence[Command]:
    del subgroup, reason
    return ()


@dataclass(frozen=True, slots=True)
class _Stop:
    """A signal to send to all processes that still run, and when."""

    at_s: float
    number: signal.Signals
    subgroup: str = ""
    """Only to those of one subgroup; to all if empty."""


def run_process_group(
    commands: Sequence[Command],
    out: BinaryIO,
    err: BinaryIO,
    *,
    grace_s: float = 10.0,
    timeout_s: float | None = None,
    around: Around = nullcontext,
    restart: Restart = _never,
) -> GroupExit:
    """Run all commands until all have ended; a signal to end that reaches this process ends them.

    Args:
        commands: What to run.
        out: Gets their standard output, line by line.
        err: Gets their standard error.
        grace_s: How long the others continue after one failed.
        timeout_s: End all after this time.
        around: Called with the process groups by label. What it returns is entered once they have started, and left
            before processes that are left over are killed.
        restart: Asked when a subgroup has failed and ended while another one runs; what it returns is started instead.
    """
    with (
        closing(open_signal_pipe(heeded_termination_signals())) as signals,
        ProcessGroup(commands, out, err, grace_s, around, restart) as group,
    ):
        return group.watch(signals, timeout_s)


class ProcessGroup:
    """The processes that run, what they print, and what is to be done about them next."""

    def __init__(
        self,
        commands: Sequence[Command],
        out: BinaryIO,
        err: BinaryIO,
        grace_s: float,
        around: Around = nullcontext,
        restart: Restart = _never,
    ) -> None:
        self._commands = commands
        self._around_groups, self._restart = around, restart
        self._stack = ExitStack()
        self._sinks = (out, err)
        self._grace_s = grace_s
        self._running: dict[int, tuple[subprocess.Popen[bytes], Command]] = {}
        self._groups: dict[int, str] = {}
        """Process groups, and the subgroups that they belong to."""
        self._streams: set[LabeledStream] = set()
        self._stderr: dict[str, LabeledStream] = {}
        """Standard error of each process, by label."""
        self._errors: dict[bytes, bytes] = {}
        self._selector = selectors.DefaultSelector()
        self._stops: deque[_Stop] = deque()
        self._partial: list[_Stop] = []
        """Stops of single subgroups."""
        self._lost: dict[str, GroupExit] = {}
        """How subgroups ended that failed."""
        self._exit = GroupExit()
        self._guards: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> "ProcessGroup":
        try:
            self._start_all(self._commands)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        for group in self._groups:
            signal_group(group, signal.SIGKILL)
        with suppress(OSError):
            # Whatever reads our lines may be gone.
            self._drain()
        for guard in self._guards:
            guard.kill()
            guard.communicate()
        for pidfd, (process, _command) in self._running.items():
            process.wait()
            os.close(pidfd)
        self._selector.close()

    def watch(self, signals: SignalPipe, timeout_s: float | None) -> GroupExit:
        """Pass lines on until every process has ended."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._selector.register(signals, selectors.EVENT_READ, signals)
        while self._running:
            self._step(deadline)
            if timeout_s is not None and deadline is not None and time.monotonic() >= deadline:
                deadline = None
                self._end_all(GroupExit.timed_out(timeout_s), 0.0)
        self._selector.unregister(signals)
        return self._exit if self._exit.code or not self._lost else self._exit_of_subgroups()

    def _exit_of_subgroups(self) -> GroupExit:
        """Return a clean exit if a subgroup is left, otherwise the first failure."""
        if {command.subgroup for command in self._commands} <= self._lost.keys():
            return next(iter(self._lost.values()))
        return GroupExit(lost=tuple(self._lost.values()))

    def _start_all(self, commands: Sequence[Command]) -> None:
        groups = {command.label: self._start(command) for command in commands}
        self._guards.append(start_guard(list(groups.values())))
        self._stack.enter_context(self._around_groups(groups))

    def _start(self, command: Command) -> int:
        process = subprocess.Popen(  # noqa: S603 (running what the person asks for is the purpose)
            command.argv,
            env=dict(command.environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=ChildSetup(os.getpid(), joins=command.joins),
        )
        pidfd = os.pidfd_open(process.pid)
        self._running[pidfd] = process, command
        self._groups[process.pid] = command.subgroup
        self._selector.register(pidfd, selectors.EVENT_READ)
        for pipe, sink in zip((process.stdout, process.stderr), self._sinks, strict=True):
            assert pipe is not None
            errors = self._errors if pipe is process.stderr else {}
            stream = LabeledStream(pipe, sink, command.label, errors)
            self._streams.add(stream)
            self._stderr[command.label] = stream
            self._selector.register(pipe, selectors.EVENT_READ, stream)
        return process.pid

    def _step(self, deadline: float | None) -> None:
        """Wait for whatever is next, and handle it."""
        due_s = [stop.at_s for stop in [*list(self._stops)[:1], *self._partial]]
        due_s += [] if deadline is None else [deadline]
        patience_s = max(0.0, min(due_s) - time.monotonic()) if due_s else None
        for key, _ in self._selector.select(patience_s):
            match key.data:
                case LabeledStream():
                    self._read(key.data)
                case SignalPipe():
                    self._take_signals(key.data.read())
                case _:
                    self._reap(key.fd)
        while self._stops and self._stops[0].at_s <= time.monotonic():
            self._stop(self._stops.popleft())
        due = [stop for stop in self._partial if stop.at_s <= time.monotonic()]
        self._partial = [stop for stop in self._partial if stop not in due]
        for stop in due:
            self._stop(stop)

    def _take_signals(self, numbers: Sequence[int]) -> None:
        """End all at a signal to end; others arrive here too, if other code handles them."""
        for number in numbers:
            if number in TERMINATION_SIGNALS:
                self._end_all(GroupExit.interrupted(number), 0.0)

    def _stop(self, stop: _Stop) -> None:
        for process, command in self._running.values():
            if not stop.subgroup or command.subgroup == stop.subgroup:
                signal_group(process.pid, stop.number)

    def _read(self, stream: LabeledStream) -> None:
        # All of it may have been read when its process ended, a moment ago.
        if stream in self._streams and not stream.pass_on():
            self._selector.unregister(stream.pipe)
            self._streams.discard(stream)
            stream.pipe.close()

    def _reap(self, pidfd: int) -> None:
        process, command = self._running.pop(pidfd)
        self._selector.unregister(pidfd)
        os.close(pidfd)
        code = process.wait()
        if code:
            self._note_failure(self._failure(code, command.label), command.subgroup)
        if command.subgroup in self._lost and not self._exit.code:
            self._replace(command.subgroup)

    def _note_failure(self, failure: GroupExit, subgroup: str) -> None:
        """Keep the first failure, of all or of a subgroup; one that another one caused is replaced by that one."""
        if self._exit.code:
            if self._exit.is_caused_by(failure):
                self._exit = failure
        elif not subgroup:
            self._end_all(failure, self._grace_s)
        elif subgroup not in self._lost:
            self._lost[subgroup] = failure
            self._partial += _stops(self._grace_s, subgroup)
        elif self._lost[subgroup].is_caused_by(failure):
            self._lost[subgroup] = failure

    def _failure(self, code: int, label: str) -> GroupExit:
        """Return how a process failed, with the last line that it wrote."""
        stream = self._stderr[label]
        while stream in self._streams and select.select([stream.pipe], [], [], 0)[0]:
            self._read(stream)
        return GroupExit.failed(label, code, stream.last_line)

    def _replace(self, subgroup: str) -> None:
        """Restart a lost subgroup once none of it is left, if another one still runs that it can rejoin."""
        running = {command.subgroup for _, command in self._running.values()}
        if subgroup in running or running <= self._lost.keys():
            return
        commands = self._restart(subgroup, self._lost[subgroup])
        if commands:
            del self._lost[subgroup]
            for group in [group for group, its in self._groups.items() if its == subgroup]:
                signal_group(group, signal.SIGKILL)
                del self._groups[group]
            self._partial = [stop for stop in self._partial if stop.subgroup != subgroup]
            self._start_all(commands)

    def _end_all(self, reason: GroupExit, grace_s: float) -> None:
        """End all. The first reason counts; if SIGTERM was sent already, a second one makes SIGKILL come now."""
        if not self._exit.code:
            self._exit = reason
        asked = len(self._stops) == 1
        self._stops = deque([_Stop(time.monotonic(), signal.SIGKILL)] if asked else _stops(grace_s))

    def _drain(self) -> None:
        """Pass on what is left in the pipes, for a moment: an unknown process may still hold them open."""
        deadline = time.monotonic() + _DRAIN_S
        while self._streams and (patience_s := deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(patience_s):
                if isinstance(key.data, LabeledStream):
                    self._read(key.data)
        for stream in self._streams:
            stream.pipe.close()


def _stops(grace_s: float, subgroup: str = "") -> list[_Stop]:
    now = time.monotonic()
    return [_Stop(now + grace_s, signal.SIGTERM, subgroup), _Stop(now + grace_s + _KILL_S, signal.SIGKILL, subgroup)]


def start_guard(groups: Sequence[int]) -> subprocess.Popen[bytes]:
    """Start a shell that waits for the end of its input, which comes when we die, and then kills the process groups."""
    script = 'read -r _; kill -s KILL -- "$@"'
    return subprocess.Popen(  # noqa: S603
        ["sh", "-c", script, "guard", *(f"-{group}" for group in groups)],  # noqa: S607
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def signal_group(group: int, number: signal.Signals) -> None:
    """Send a signal to a process group, if any of it is left."""
    with suppress(ProcessLookupError):
        os.killpg(group, number)
