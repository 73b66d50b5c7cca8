"""Teams on this machine, each with a supervisor of its own. All that is known about them is on disk.

So a new launcher of the same directory knows what an earlier one knew, and nothing is lost with a server that is
killed. A team belongs to the process that first writes its `state.json`: its supervisor, or a launcher that abandons
it.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from mimatrix.core.errors import UserError, WorldError, nearest
from mimatrix.core.exit_codes import CANNOT_FORK
from mimatrix.launch.devices import DeviceInfo, NodeInfo, find_devices
from mimatrix.launch.environment import ADDRESS
from mimatrix.launch.launcher import LogPart, MemberState, Phase, Team, TeamState
from mimatrix.launch.local.launch_spec import build_spec, validate_name
from mimatrix.launch.local.log_files import read_log
from mimatrix.launch.local.reaper import KILL_NOW
from mimatrix.launch.local.store import LaunchSpec, SupervisorState, TeamFolder, all_lost, judge
from mimatrix.launch.start_failure import StartError, is_transient
from mimatrix.processes.proc import identify, is_alive, send

_CLAIM_S = 15.0
# Longer than any launcher waits for a supervisor, so that one that waits decides first.
_ABANDONED_S = 2 * _CLAIM_S
_SWEEP_S = 3600.0
# The code that runs here, so that the supervisor runs the same.
_CODE = Path(__file__).parents[3]


class LocalLauncher:
    """Starts teams on this machine and reports what became of them, by the files in `folder`."""

    def __init__(self, folder: Path, node: str = "", devices: tuple[DeviceInfo, ...] | None = None) -> None:
        self._teams = folder.absolute() / "teams"
        self._name = node or socket.gethostname()
        self._devices = devices
        self._ended: dict[tuple[str, int], TeamState] = {}
        """By name and time of their files: what has not changed since a team ended need not be read again."""

    def nodes(self) -> tuple[NodeInfo, ...]:
        """Return one node: this machine."""
        return (self._node,)

    def start(self, team: Team) -> None:
        """Start all members, or none. A team of this name that was started already is left as it is.

        An archive that takes more than a few seconds is unpacked after this has returned; `states` then tells why the
        team was not started.
        """
        validate_name(team.name)
        folder = TeamFolder(self._teams / team.name)
        try:
            state = folder.read_state()
            if state and state.team.unreadable:
                raise StartError(f'team "{team.name}" may be running: {state.team.unreadable}', is_transient=False)
            # If a launcher was killed before a supervisor claimed the team, there is a launch spec and nothing more.
            if state is None:
                _write(folder, build_spec(team, self._node))
                _hand_over(folder)
        except OSError as error:
            sentence = f'team "{team.name}" cannot be started ({error})'
            raise StartError(sentence, is_transient=is_transient(error)) from None

    def states(self) -> Mapping[str, TeamState]:
        """Return all teams by name, also those that an earlier launcher started, until they are forgotten."""
        before, self._ended = self._ended, {}
        states = {}
        for folder in self._folders():
            key = (folder.path.name, folder.written_ns())
            state = before.get(key) or _state(folder)
            if state is not None:
                states[folder.path.name] = state
                if state.has_ended:
                    self._ended[key] = state
        return states

    def end(self, team: str, *, now: bool = False) -> None:
        """Send SIGTERM to all processes of a team, and SIGKILL after the grace period; `now`: SIGKILL at once."""
        folder = self._folder(team)
        _abandon(folder, "it was ended before it was started")
        state = folder.read_state()
        if state and state.team.unreadable:
            raise WorldError(f'team "{team}" cannot be ended: {state.team.unreadable}')
        if state and state.supervisor and not state.team.has_ended:
            try:
                send(state.supervisor, KILL_NOW if now else signal.SIGTERM)
            except PermissionError:
                raise WorldError(f'team "{team}" was started by another user, who alone can end it') from None

    def read_log(self, team: str, rank: int, offset: int, most: int = 65_536) -> LogPart:
        """Return output of a member from `offset` on, below 0 from its end; from the oldest byte that is kept."""
        folder = self._folder(team)
        if not 0 <= rank < folder.ranks():
            raise UserError(f'team "{team}" has no rank {rank}; use 0 to {folder.ranks() - 1}')
        return read_log(folder.log(rank), offset, most)

    def forget(self, team: str) -> None:
        """Remove what is kept of a team that has ended. One that is unknown is forgotten already."""
        validate_name(team)
        folder = TeamFolder(self._teams / team)
        state = _state(folder)
        if state is None:
            return
        if state.unreadable:
            raise WorldError(f'team "{team}" may be running: {state.unreadable}')
        if not state.has_ended:
            raise UserError(f'team "{team}" has not ended; end it first')
        _remove(folder)

    def close(self) -> None:
        """Do nothing: nothing is held."""

    @cached_property
    def _node(self) -> NodeInfo:
        return NodeInfo(self._name, ADDRESS, find_devices() if self._devices is None else self._devices)

    def _folders(self) -> list[TeamFolder]:
        paths = sorted(self._teams.iterdir()) if self._teams.is_dir() else []
        return [TeamFolder(path) for path in paths if not path.name.startswith(".")]

    def _folder(self, team: str) -> TeamFolder:
        known = {folder.path.name: folder for folder in self._folders()}
        if team not in known:
            raise UserError(f'there is no team "{team}"{nearest(team, known) if known else "; none was started"}')
        return known[team]


def _write(folder: TeamFolder, spec: LaunchSpec) -> None:
    """Create the directory of a team together with its launch spec; one that is there is left as it is."""
    if folder.path.exists():
        return
    # Members that run as another user pass through it, without seeing the names of the teams.
    folder.path.parent.mkdir(mode=0o711, parents=True, exist_ok=True)
    _sweep(folder.path.parent)
    draft = TeamFolder(folder.path.with_name(f".draft-{uuid.uuid4().hex}"))
    try:
        draft.path.mkdir(mode=0o711)
        draft.write_spec(spec)
        draft.path.rename(folder.path)
    except OSError:
        shutil.rmtree(draft.path, ignore_errors=True)
        if not folder.path.exists():
            raise


def _hand_over(folder: TeamFolder) -> None:
    """Start a supervisor, and wait for a while until it has started the members or says why it cannot."""
    folder.read_spec()  # raises if another version of MiMatrix wrote it
    folder.renew_spec()
    reason, may_work_later = _start_supervisor(folder)
    _abandon(folder, reason)
    state = folder.read_state()
    assert state, "a launcher that abandons a team writes it"
    if state.supervisor is None:
        _remove(folder)
        raise StartError(f'team "{folder.path.name}" cannot be started: {reason}', is_transient=may_work_later)
    if state.team.start_failure and state.team.has_ended:
        _remove(folder)
        raise state.team.start_failure.to_error()


def _start_supervisor(folder: TeamFolder) -> tuple[str, bool]:
    """Start a supervisor; return when it need not be waited for any longer, or after the deadline.

    Returns:
        Why the team has no supervisor, in case no process has claimed it, and whether another try may help.
    """
    command = [sys.executable, "-m", "mimatrix.launch.local.supervisor", str(folder.path)]
    try:
        with folder.supervisor_log.open("ab") as log:
            done = subprocess.run(  # noqa: S603 (the command is ours)
                command,
                cwd=_CODE,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                timeout=_CLAIM_S,
                check=False,
            )
    except subprocess.TimeoutExpired:
        return f"no supervisor claimed it within {_CLAIM_S:g} s", True
    except OSError as error:
        return f"no supervisor can be started ({error})", is_transient(error)
    # One that was killed was so by the kernel, because memory is short.
    may_work_later = done.returncode < 0 or done.returncode == CANNOT_FORK
    return f"its supervisor ended at once ({_last_line(folder.supervisor_log)})", may_work_later


def _abandon(folder: TeamFolder, reason: str) -> None:
    """Claim a team that no process has claimed, so that no supervisor can any more: its members are lost."""
    if folder.read_state() is None:
        folder.claim(SupervisorState(all_lost(folder.ranks(), reason)))


def _state(folder: TeamFolder) -> TeamState | None:
    """Return how a team is; None if it was forgotten meanwhile."""
    try:
        state = folder.read_state() or _unclaimed(folder)
        if state is None:
            return TeamState((MemberState(Phase.STARTING),) * folder.ranks())
        if state.team.has_ended or state.team.unreadable or (state.supervisor and is_alive(state.supervisor)):
            return state.team
        # Between our reading and our looking it may have written its last state and ended.
        return judge(folder.read_state() or state, is_alive)
    except FileNotFoundError:
        return None
    except OSError as error:  # no descriptor is left, or the disk fails
        return TeamState((), unreadable=f"{folder.path} cannot be read ({error.strerror})")


def _unclaimed(folder: TeamFolder) -> SupervisorState | None:
    """Return the state of a team that no process claimed: None while a supervisor may still do so."""
    if folder.spec_age_s(time.time()) >= _ABANDONED_S:
        with suppress(OSError):  # a full disk; the next call tries again
            _abandon(folder, "its launcher was gone before a supervisor claimed it")
    return folder.read_state()


def _remove(folder: TeamFolder) -> None:
    """Make a team disappear at once, then remove its files."""
    state = folder.read_state()
    gone = folder.path.with_name(f".gone-{uuid.uuid4().hex}")
    with suppress(FileNotFoundError):
        folder.path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)
    if state and state.supervisor and identify(state.supervisor.pid) == state.supervisor:
        # In a container whose first process we are, those whose parent is gone are ours to wait for.
        with suppress(ChildProcessError):
            os.waitpid(state.supervisor.pid, os.WNOHANG)


def _sweep(teams: Path) -> None:
    """Remove what is left of launchers that were killed while they wrote or removed a team."""
    for path in teams.glob(".*"):
        with suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > _SWEEP_S:
                shutil.rmtree(path, ignore_errors=True)


def _last_line(file: Path) -> str:
    with suppress(OSError):
        lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "without a message")
    return "without a message"
