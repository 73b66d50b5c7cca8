"""The supervisor of one team: a process of its own that outlives the one that started it.

`python -m mimatrix.launch.local.supervisor FOLDER` starts it. It unpacks the archive, has a reaper start each member,
keeps what they print, ends all members, or those of a group, when one fails, restarts a lost group if it may, ends all
when it is told to, and records every change. It ends when no process of the team is left.
"""

import logging
import os
import selectors
import signal
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from mimatrix.core.environment import REJOINS
from mimatrix.core.exit_codes import CANNOT_FORK, FAILED
from mimatrix.core.logs import configure_logging
from mimatrix.launch.local.archive import read_failure, start_unpacking
from mimatrix.launch.local.log_files import RotatingLog
from mimatrix.launch.local.reaper import (
    KILL_NOW,
    ProcessSpec,
    ReaperEvent,
    ReaperEventKind,
    ReaperHandle,
    read_events,
    start_reaper,
)
from mimatrix.launch.local.store import LaunchSpec, SupervisorState, TeamFolder
from mimatrix.launch.local.team_state import StopLevel, TeamStateMachine
from mimatrix.launch.local.users import find_account
from mimatrix.launch.start_failure import StartFailure, StartFailureKind, is_transient
from mimatrix.processes.proc import TERMINATION_SIGNALS, ProcessId, adopt_orphans, descendants, identify, send
from mimatrix.processes.signals import SignalPipe, open_signal_pipe

_CHUNK = 1 << 16
_KILL_S, _RETRY_S = 5.0, 0.02
_UNPACK_S = 120.0
_SETTLE_S = 5.0
"""How long the process that starts a supervisor waits for the members; a large archive may take longer to unpack."""
_SAVE_RETRY_S, _LAST_SAVES = 1.0, 60
"""How often, and how many times at the end, a state is written again that a full disk did not take."""
_RESTART_S, _LONGEST_RESTART_S = 0.5, 30.0
"""The delay before a lost group is restarted."""
_IGNORED_BY_PYTHON = {signal.SIGPIPE, signal.SIGXFSZ}
"""Python ignores them itself, and undoes that in what it starts."""
_CLAIMED = b"c"

logger = logging.getLogger("mimatrix.launch.supervisor")


def main() -> int:
    """Start the supervisor of a directory; return when its members have started, when they cannot, or after a while."""
    receiver, sender = os.pipe()
    try:
        child = os.fork()
    except OSError as error:
        logger.error("no process can be started (%s)", error.strerror)
        return CANNOT_FORK if is_transient(error) else FAILED
    if child:
        os.close(sender)
        _wait_until_settled(receiver)
        return 0
    os.close(receiver)
    supervise(TeamFolder(Path(sys.argv[1])), sender)
    return 0


def supervise(folder: TeamFolder, sender: int) -> None:
    """Run the team of this directory until it has ended, unless another process has claimed it.

    Args:
        folder: The directory of the team.
        sender: Gets a byte once the team is claimed, and is closed once all members have started.
    """
    supervisor = Supervisor(folder, folder.read_spec(), _listen(), sender)
    adopt_orphans()
    if folder.claim(supervisor.state):
        with suppress(BrokenPipeError):  # the launcher no longer waits, but the team is claimed
            os.write(sender, _CLAIMED)
        supervisor.run()


class Supervisor:
    """The reapers that are at work, and what is known about their members."""

    def __init__(self, folder: TeamFolder, spec: LaunchSpec, signals: SignalPipe, sender: int) -> None:
        ranks = len(spec.environments)
        self._folder, self._spec = folder, spec
        self._signals, self._sender = signals, sender
        self._process = identify(os.getpid())
        self._team = TeamStateMachine(ranks, spec.groups, spec.restarts, has_remote_members=spec.has_remote_members)
        self._logs = [RotatingLog(folder.log(rank)) for rank in range(ranks)]
        self._handles: dict[int, ReaperHandle] = {}
        self._reapers: list[ProcessId | None] = [None] * ranks
        self._account = find_account(spec.run_as)
        self._selector = selectors.DefaultSelector()
        self._sent: dict[int, StopLevel] = {}
        self._saved: SupervisorState | None = None
        self._has_warned = False
        self._restarting: dict[int, float] = {}
        """Lost groups, and when they are restarted."""
        self._delay_s = _RESTART_S
        self._is_settled = False

    @property
    def state(self) -> SupervisorState:
        """What launchers read about the team now."""
        team = replace(self._team.team, is_restarting=bool(self._restarting))
        return SupervisorState(team, self._process, tuple(self._reapers))

    def run(self) -> None:
        """Start all members and stay until nothing of them is left."""
        self._unpack()
        if not self._team.team.has_ended:
            self._selector.register(self._signals, selectors.EVENT_READ)
            self._start(range(len(self._spec.environments)))
            self._save()
        while self._handles or self._restarting:
            if self._team.has_started:
                self._settle()
            self._step()
        for log in self._logs:
            log.close()  # not before: a member that is restarted appends to it
        for _ in range(_LAST_SAVES):
            if self._save():
                break
            time.sleep(_SAVE_RETRY_S)

    def _settle(self) -> None:
        """Let the process that started this one return."""
        if not self._is_settled:
            self._is_settled = True
            os.close(self._sender)

    def _unpack(self) -> None:
        """Fill the work directory, or note that no member can be started."""
        child, receiver = start_unpacking(Path(self._spec.archive), self._folder.work, self._account)
        data = self._read_until_end(child, receiver)
        os.close(receiver)
        _, status = os.waitpid(child, 0)
        if self._team.is_stopping:
            self._team.cancel()
        elif failure := _unpack_failure(self._spec.archive, data, os.waitstatus_to_exitcode(status)):
            self._team.refuse(failure)

    def _read_until_end(self, child: int, receiver: int) -> bytes | None:
        """Read what the child says until it ends; None if it had to be killed because it took too long."""
        data, deadline = b"", time.monotonic() + _UNPACK_S
        with selectors.DefaultSelector() as selector:
            selector.register(receiver, selectors.EVENT_READ)
            selector.register(self._signals, selectors.EVENT_READ)
            while True:
                ready = {key.fd for key, _ in selector.select(max(0.0, deadline - time.monotonic()))}
                if self._signals.fileno() in ready:
                    self._take_signals()
                    os.kill(child, signal.SIGKILL)
                if not ready:
                    os.kill(child, signal.SIGKILL)
                    return None
                if receiver in ready:
                    chunk = os.read(receiver, _CHUNK)
                    data += chunk
                    if not chunk:
                        return data

    def _start(self, ranks: Iterable[int]) -> None:
        """Have these members started, for the first time or again."""
        for rank in ranks:
            try:
                handle = start_reaper(self._process_spec(rank))
            except OSError as error:  # no process, descriptor or disk space is left
                kind, now_s = ReaperEventKind.REFUSED, time.monotonic()
                event = ReaperEvent(kind, now_s, detail=str(error), is_transient=is_transient(error))
                self._team.take([(rank, event)])
                continue
            self._handles[rank], self._reapers[rank] = handle, handle.reaper
            self._sent.pop(rank, None)
            self._selector.register(handle.output, selectors.EVENT_READ, rank)
            self._selector.register(handle.events, selectors.EVENT_READ, rank)

    def _process_spec(self, rank: int) -> ProcessSpec:
        spec = self._spec
        restarts = {REJOINS.name: str(self._team.team.members[rank].restarts)} if spec.groups else {}
        return ProcessSpec(
            command=spec.command,
            environment=spec.environments[rank] | restarts,
            folder=self._folder.work,
            grace_s=spec.grace_s,
            account=self._account,
        )

    def _step(self) -> None:
        """Wait for whatever is next, handle it, and record it."""
        events: list[tuple[int, ReaperEvent]] = []
        gone: list[int] = []
        waits = [_SAVE_RETRY_S] * (self._saved != self.state)
        waits += [at_s - time.monotonic() for at_s in self._restarting.values()]
        for key, _ in self._selector.select(max(0.0, min(waits)) if waits else None):
            if key.fd == self._signals.fileno():
                self._take_signals()
            elif key.fd == self._handles[key.data].output:
                self._read_output(key.data)
            elif chunk := os.read(key.fd, _CHUNK):
                events += [(key.data, event) for event in read_events(chunk)]
            else:
                gone.append(key.data)
        self._team.take(events)
        for rank in gone:
            self._reap(rank)
        self._restart_lost()
        self._pass_on_stops()
        self._save()

    def _restart_lost(self) -> None:
        """Restart lost groups after a delay, which grows, as they may be lost again at once."""
        now_s, lost = time.monotonic(), self._team.lost()
        self._restarting = {group: self._restarting.get(group, now_s + self._delay_s) for group in lost}
        for group in [group for group, at_s in self._restarting.items() if at_s <= now_s]:
            del self._restarting[group]
            if self._may_restart():
                self._delay_s = min(_LONGEST_RESTART_S, 2 * self._delay_s)
                self._start(self._team.restart_group(group))
            else:
                self._team.abandon(group)

    def _may_restart(self) -> bool:
        """Whether there is something to rejoin, as the file says that the job's processes write for that."""
        try:
            return bool(self._spec.restart_after) and Path(self._spec.restart_after).exists()
        except OSError:  # of a file system that is gone, or not for us
            return False

    def _take_signals(self) -> None:
        for number in self._signals.read():
            if number == KILL_NOW or number in TERMINATION_SIGNALS:
                self._team.stop(StopLevel.KILL if number == KILL_NOW else StopLevel.TERMINATE)

    def _read_output(self, rank: int) -> bool:
        """Take what a member has printed; return False if there is nothing."""
        output = self._handles[rank].output
        try:
            chunk = os.read(output, _CHUNK)
        except BlockingIOError:
            return False
        self._logs[rank].write(chunk)
        if not chunk:
            with suppress(KeyError):
                self._selector.unregister(output)
        return bool(chunk)

    def _reap(self, rank: int) -> None:
        """Handle the end of a reaper: kill what it had to leave to us, and take the last that its member printed."""
        handle = self._handles[rank]
        with suppress(ChildProcessError):
            # Not before it can be waited for are its children ours.
            os.waitpid(handle.reaper.pid, 0)
        self._kill_strays(exclude={other.reaper.pid for number, other in self._handles.items() if number != rank})
        while self._read_output(rank):
            pass
        for descriptor in (handle.output, handle.events):
            with suppress(KeyError):
                self._selector.unregister(descriptor)
            os.close(descriptor)
        del self._handles[rank]
        self._team.reap(rank, time.monotonic())

    def _kill_strays(self, exclude: set[int]) -> None:
        """Kill all our descendants that are not below these reapers, as far as that can be done soon."""
        deadline = time.monotonic() + _KILL_S
        while (strays := descendants(os.getpid(), exclude)) and time.monotonic() < deadline:
            for process in strays:
                with suppress(PermissionError):
                    send(process, signal.SIGKILL)
            time.sleep(_RETRY_S)
            _wait_for_ended()

    def _pass_on_stops(self) -> None:
        """Tell the reapers what they have not been told yet."""
        for rank, handle in self._handles.items():
            level = self._team.stop_level(rank)
            if level > self._sent.get(rank, StopLevel.NONE):
                try:
                    send(handle.reaper, KILL_NOW if level == StopLevel.KILL else signal.SIGTERM)
                except OSError as error:  # no descriptor is left; the next turn tries again
                    logger.warning("rank %d cannot be told to stop now (%s)", rank, error.strerror)
                    continue
                self._sent[rank] = level

    def _save(self) -> bool:
        """Record what has changed; return False if the disk does not take it."""
        state = self.state
        if state != self._saved:
            try:
                self._folder.save(state)
            except OSError as error:
                if not self._has_warned:
                    logger.warning("the state of %s cannot be written (%s)", self._folder.path.name, error.strerror)
                self._has_warned = True
                return False
            self._saved = state
        return True


def _unpack_failure(archive: str, data: bytes | None, returncode: int) -> StartFailure | None:
    """Return why the archive was not unpacked, from what the child said and how it ended."""
    if data is None:
        detail = f"that took longer than {_UNPACK_S:g} s"
        return StartFailure(kind=StartFailureKind.UNPACKING, detail=detail, archive=archive, is_transient=True)
    if data:
        return read_failure(data)
    if returncode:
        detail = f"the process for that ended with code {returncode}"
        is_killed = returncode < 0  # by the kernel, which is short of memory
        return StartFailure(kind=StartFailureKind.UNPACKING, detail=detail, archive=archive, is_transient=is_killed)
    return None


def _wait_until_settled(receiver: int) -> None:
    """Wait until a supervisor has claimed the team, and a little longer for its members."""
    if os.read(receiver, 1):
        with selectors.DefaultSelector() as selector:
            selector.register(receiver, selectors.EVENT_READ)
            selector.select(_SETTLE_S)


def _listen() -> SignalPipe:
    """Receive signals to end on a pipe from now on, whatever our parent did with signals."""
    for number in signal.valid_signals() - _IGNORED_BY_PYTHON:
        if signal.getsignal(number) == signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    pipe = open_signal_pipe((*TERMINATION_SIGNALS, KILL_NOW))
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    return pipe


def _wait_for_ended() -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


if __name__ == "__main__":
    configure_logging()
    sys.exit(main())
