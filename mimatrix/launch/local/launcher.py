"""Teams on this machine, each with a keeper of its own. All that is known of them is on disk.

So a launcher that is made anew on the same folder knows what an earlier one knew, and nothing is lost with a server
that is killed. A team belongs to the first who writes its `state.json`: its keeper, or a launcher that gives it up.
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
from mimatrix.launch.devices import find_devices
from mimatrix.launch.environment import ADDRESS
from mimatrix.launch.launcher import DeviceFacts, LogPart, MemberState, NodeFacts, Phase, Team, TeamState
from mimatrix.launch.local.launch_spec import check_name, make_order
from mimatrix.launch.local.log_files import read_log
from mimatrix.launch.local.reaper import NOW
from mimatrix.launch.local.store import Order, Record, TeamFolder, all_lost, judge
from mimatrix.processes.proc import identify, lives, send

_TAKEN_S = 15.0
# Longer than anybody who lives waits for a keeper, so that whoever waits has the first word.
_ABANDONED_S = 2 * _TAKEN_S
_SWEPT_S = 3600.0
# The code that runs here, so that the keeper runs the same.
_CODE = Path(__file__).parents[3]


class LocalLauncher:
    """Starts teams on this machine and tells what became of them, by the files in `folder`."""

    def __init__(self, folder: Path, node: str = "", devices: tuple[DeviceFacts, ...] | None = None) -> None:
        self._teams = folder.absolute() / "teams"
        self._name = node or socket.gethostname()
        self._devices = devices
        self._ended: dict[tuple[str, int], TeamState] = {}
        """By name and the age of their records: what has not changed since a team ended need not be read again."""

    def nodes(self) -> tuple[NodeFacts, ...]:
        """One: the machine we are on."""
        return (self._node,)

    def start(self, team: Team) -> None:
        """Start all members, or none. A team of this name that was started already is left as it is."""
        check_name(team.name)
        folder = TeamFolder(self._teams / team.name)
        # Of a launcher that was killed before a keeper took the team, there is an order and nothing more.
        if folder.read_record() is None:
            order = make_order(team, self._node)
            try:
                _write(folder, order)
                _hand_over(folder)
            except OSError as error:
                raise WorldError(f'team "{team.name}" cannot be started ({error})') from None

    def states(self) -> Mapping[str, TeamState]:
        """All teams that are known by name, also those that an earlier launcher started; until they are forgotten."""
        before, self._ended = self._ended, {}
        found = {}
        for folder in self._folders():
            key = (folder.path.name, folder.written_ns())
            state = before.get(key) or _state(folder)
            if state is not None:
                found[folder.path.name] = state
                if state.has_ended:
                    self._ended[key] = state
        return found

    def end(self, team: str, *, now: bool = False) -> None:
        """Tell all members to end, and kill what is left after the grace; `now`: kill at once. Whole process trees."""
        folder = self._folder(team)
        _give_up(folder, "ended before it was started")
        record = folder.read_record()
        if record and record.keeper and not record.team.has_ended:
            try:
                send(record.keeper, NOW if now else signal.SIGTERM)
            except PermissionError:
                raise WorldError(f'the keeper of team "{team}" belongs to another user, who alone can end it') from None

    def read_log(self, team: str, rank: int, offset: int, most: int = 65_536) -> LogPart:
        """Output of a member from `offset` on, below 0 from its end; from the oldest where that was dropped already."""
        folder = self._folder(team)
        if not 0 <= rank < folder.ranks():
            raise UserError(f'team "{team}" has no rank {rank}; use 0 to {folder.ranks() - 1}')
        return read_log(folder.log(rank), offset, most)

    def forget(self, team: str) -> None:
        """Remove what is kept of a team that has ended. One that is not known is forgotten already."""
        check_name(team)
        folder = TeamFolder(self._teams / team)
        state = _state(folder)
        if state is None:
            return
        if not state.has_ended:
            raise UserError(f'team "{team}" has not ended; end it first')
        _remove(folder)

    def close(self) -> None:
        """Nothing is held."""

    @cached_property
    def _node(self) -> NodeFacts:
        return NodeFacts(self._name, ADDRESS, find_devices() if self._devices is None else self._devices)

    def _folders(self) -> list[TeamFolder]:
        paths = sorted(self._teams.iterdir()) if self._teams.is_dir() else []
        return [TeamFolder(path) for path in paths if not path.name.startswith(".")]

    def _folder(self, team: str) -> TeamFolder:
        known = {folder.path.name: folder for folder in self._folders()}
        if team not in known:
            raise UserError(f'there is no team "{team}"{nearest(team, known) if known else "; none was started"}')
        return known[team]


def _write(folder: TeamFolder, order: Order) -> None:
    """Make the folder of a team with the order in it, both at once; one that is there is left as it is."""
    if folder.path.exists():
        return
    folder.path.parent.mkdir(parents=True, exist_ok=True)
    _sweep(folder.path.parent)
    draft = TeamFolder(folder.path.with_name(f".draft-{uuid.uuid4().hex}"))
    try:
        draft.path.mkdir(mode=0o711)
        draft.write_order(order)
        draft.path.rename(folder.path)
    except OSError:
        shutil.rmtree(draft.path, ignore_errors=True)
        if not folder.path.exists():
            raise


def _hand_over(folder: TeamFolder) -> None:
    """Start a keeper, and wait until it has started the members or says why it cannot."""
    folder.renew_order()
    _give_up(folder, _start_keeper(folder))
    record = folder.read_record()
    assert record, "whoever gives a team up writes one"
    if record.keeper is None:
        _remove(folder)
        cause = record.team.members[0].cause
        assert cause, "it is lost"
        raise WorldError(f'team "{folder.path.name}" cannot be started: {cause.detail}')
    if record.refusal and record.team.has_ended:
        _remove(folder)
        raise UserError(record.refusal)


def _start_keeper(folder: TeamFolder) -> str:
    """Return when the keeper has nothing more to wait for, or after the deadline: what to say if it took nothing."""
    words = [sys.executable, "-m", "mimatrix.launch.local.supervisor", str(folder.path)]
    try:
        with folder.keeper_log.open("ab") as log:
            subprocess.run(  # noqa: S603 (the words are ours)
                words,
                cwd=_CODE,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                timeout=_TAKEN_S,
                check=False,
            )
    except subprocess.TimeoutExpired:
        return f"no keeper took it over within {_TAKEN_S:g} s"
    except OSError as error:
        return f"no keeper can be started ({error})"
    return f"its keeper ended at once ({_last_line(folder.keeper_log)})"


def _give_up(folder: TeamFolder, reason: str) -> None:
    """Claim a team that nobody has claimed, so that no keeper can any more: its members are lost."""
    if folder.read_record() is None:
        folder.claim(Record(all_lost(folder.ranks(), reason)))


def _state(folder: TeamFolder) -> TeamState | None:
    """How a team is; None where it was forgotten meanwhile."""
    try:
        record = folder.read_record() or _unclaimed(folder)
        if record is None:
            return TeamState((MemberState(Phase.STARTING),) * folder.ranks())
    except FileNotFoundError:
        return None
    if record.team.has_ended or (record.keeper and lives(record.keeper)):
        return record.team
    # Between our reading and our looking it may have written its last record and ended.
    return judge(folder.read_record() or record, lives)


def _unclaimed(folder: TeamFolder) -> Record | None:
    """The record of a team that nobody claimed: None while a keeper may still come."""
    if folder.order_age_s(time.time()) >= _ABANDONED_S:
        with suppress(OSError):  # a full disk; next time, then
            _give_up(folder, "its launcher was gone before a keeper took it over")
    return folder.read_record()


def _remove(folder: TeamFolder) -> None:
    """Out of sight at once, then piece by piece."""
    record = folder.read_record()
    gone = folder.path.with_name(f".gone-{uuid.uuid4().hex}")
    with suppress(FileNotFoundError):
        folder.path.rename(gone)
    shutil.rmtree(gone, ignore_errors=True)
    if record and record.keeper and identify(record.keeper.pid) == record.keeper:
        # Where we are the first process of a container, those whose parent is gone are ours to wait for.
        with suppress(ChildProcessError):
            os.waitpid(record.keeper.pid, os.WNOHANG)


def _sweep(teams: Path) -> None:
    """Remove what launchers left that were killed while they wrote or removed a team."""
    for path in teams.glob(".*"):
        with suppress(FileNotFoundError):
            if time.time() - path.stat().st_mtime > _SWEPT_S:
                shutil.rmtree(path, ignore_errors=True)


def _last_line(file: Path) -> str:
    with suppress(OSError):
        lines = file.read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "without a word")
    return "without a word"
