"""The files of a team, in a directory of its own: what to start, which supervisor runs it, and how its members are.

teams/NAME/order.json       a `LaunchSpec`, by the launcher
teams/NAME/state.json       a `SupervisorState`, by the process that claimed the team; replaced as a whole
teams/NAME/logs/RANK/       output
teams/NAME/work/            the archive, unpacked
teams/NAME/supervisor.log   what the supervisor itself printed, usually nothing
"""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mimatrix.core.files import create_atomic, write_atomic
from mimatrix.launch.exit_causes import ExitCause
from mimatrix.launch.launcher import MemberState, Phase, TeamState
from mimatrix.launch.team_json import (
    DECODE_ERRORS,
    FormatVersionError,
    check_version,
    decode_groups,
    decode_strings,
    decode_team_state,
    decode_variables,
    encode_team_state,
)
from mimatrix.processes.proc import ProcessId

SPEC_VERSION = 1
STATE_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec:
    """What a supervisor has to start."""

    command: tuple[str, ...]
    environments: tuple[dict[str, str], ...]
    """The whole environment of each member, in the order of their ranks."""
    archive: str
    grace_s: float
    run_as: str = ""
    groups: tuple[tuple[int, ...], ...] = ()
    restarts: int = 0
    restart_after: str = ""
    has_remote_members: bool = False


@dataclass(frozen=True, slots=True)
class SupervisorState:
    """How a team is, and which processes vouch for that: members count as running only while those live."""

    team: TeamState
    supervisor: ProcessId | None = None
    reapers: tuple[ProcessId | None, ...] = ()


class TeamFolder:
    """The files of one team."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.work = path / "work"
        self.supervisor_log = path / "supervisor.log"
        self._spec = path / "order.json"
        self._state = path / "state.json"

    def log(self, rank: int) -> Path:
        """Return the directory of one member's output."""
        return self.path / "logs" / str(rank)

    def write_spec(self, spec: LaunchSpec) -> None:
        """Write what to start, for its owner alone: it holds secrets."""
        with open(self._spec, "x", encoding="utf-8", opener=_open_private) as file:
            json.dump(_encode_spec(spec), file)

    def read_spec(self) -> LaunchSpec:
        """Return what `write_spec` wrote.

        Raises:
            FormatVersionError: Another version of MiMatrix wrote it.
        """
        data = json.loads(self._spec.read_text(encoding="utf-8"))
        check_version(data, SPEC_VERSION, self._spec)
        return _decode_spec(data)

    def ranks(self) -> int:
        """Return how many members the team has; 1 if that cannot be read any more."""
        try:
            return len(self.read_spec().environments)
        except (*DECODE_ERRORS, FormatVersionError):
            return 1

    def spec_age_s(self, now_s: float) -> float:
        """Return the age of the launch spec, given the time of day."""
        return now_s - self._spec.stat().st_mtime

    def renew_spec(self) -> None:
        """Start the age of the launch spec again: a launcher is about to hand it over."""
        os.utime(self._spec)

    def claim(self, state: SupervisorState) -> bool:
        """Write the first state; return False if another process did so before, which alone may write from then on."""
        try:
            create_atomic(self._state, json.dumps(_encode_state(state)))
        except FileExistsError:
            return False
        return True

    def save(self, state: SupervisorState) -> None:
        """Replace the state; readers see the old one or the new one."""
        write_atomic(self._state, json.dumps(_encode_state(state)))

    def written_ns(self) -> int:
        """Return when the last state was written; 0 before the first."""
        try:
            return self._state.stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def read_state(self) -> SupervisorState | None:
        """Return the last state, or None before the first.

        A file that is damaged loses the members. One of another version says nothing about them: they may run.
        """
        try:
            data = json.loads(self._state.read_text(encoding="utf-8"))
            check_version(data, STATE_VERSION, self._state)
            return _decode_state(data)
        except FileNotFoundError:
            return None
        except FormatVersionError as error:
            return SupervisorState(TeamState((), unreadable=str(error)))
        except DECODE_ERRORS:
            return SupervisorState(all_lost(self.ranks(), f"{self._state} is damaged"))


def all_lost(ranks: int, detail: str) -> TeamState:
    """Return the state of a team about which nothing can be known any more."""
    return TeamState((MemberState(Phase.LOST, ExitCause.lost(detail)),) * ranks)


def judge(state: SupervisorState, is_alive: Callable[[ProcessId], bool]) -> TeamState:
    """Return how a team is whose supervisor is gone: a member is lost as soon as its reaper is gone, too."""
    reapers = [*state.reapers, *[None] * len(state.team.members)]
    process = f" (process {state.supervisor.pid})" if state.supervisor else ""
    lost = MemberState(Phase.LOST, ExitCause.lost(f"its supervisor{process} is gone"))
    members = [
        member if member.phase in (Phase.EXITED, Phase.LOST) or (reaper and is_alive(reaper)) else lost
        for member, reaper in zip(state.team.members, reapers, strict=False)
    ]
    return replace(state.team, members=tuple(members), is_restarting=False)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _encode_spec(spec: LaunchSpec) -> dict[str, Any]:
    return {
        "version": SPEC_VERSION,
        "command": list(spec.command),
        "environments": list(spec.environments),
        "archive": spec.archive,
        "grace_s": spec.grace_s,
        "run_as": spec.run_as,
        "groups": [list(group) for group in spec.groups],
        "restarts": spec.restarts,
        "restart_after": spec.restart_after,
        "has_remote_members": spec.has_remote_members,
    }


def _decode_spec(data: Mapping[str, Any]) -> LaunchSpec:
    return LaunchSpec(
        command=decode_strings(data["command"]),
        environments=tuple(map(decode_variables, data["environments"])),
        archive=str(data["archive"]),
        grace_s=float(data["grace_s"]),
        run_as=str(data["run_as"]),
        groups=decode_groups(data["groups"]),
        restarts=int(data["restarts"]),
        restart_after=str(data["restart_after"]),
        has_remote_members=bool(data["has_remote_members"]),
    )


def _encode_state(state: SupervisorState) -> dict[str, Any]:
    return {
        "version": STATE_VERSION,
        "team": encode_team_state(state.team),
        "supervisor": _encode_process(state.supervisor),
        "reapers": [_encode_process(reaper) for reaper in state.reapers],
    }


def _decode_state(data: Mapping[str, Any]) -> SupervisorState:
    reapers = tuple(map(_decode_process, data["reapers"]))
    return SupervisorState(decode_team_state(data["team"]), _decode_process(data["supervisor"]), reapers)


def _encode_process(process: ProcessId | None) -> dict[str, int] | None:
    return None if process is None else {"pid": process.pid, "start_ticks": process.start_ticks}


def _decode_process(data: Mapping[str, Any] | None) -> ProcessId | None:
    return None if data is None else ProcessId(int(data["pid"]), int(data["start_ticks"]))
