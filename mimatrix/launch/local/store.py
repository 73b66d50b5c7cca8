"""What is written down of a team, in a folder of its own: its order, who keeps it, and how its members are.

teams/NAME/order.json     what to start, by the launcher
teams/NAME/state.json     a `Record`, by whoever claimed the team; replaced as a whole at every change
teams/NAME/logs/RANK/     output
teams/NAME/work/          the archive, unpacked
teams/NAME/keeper.log     what the keeper itself had to say, usually nothing
"""

import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mimatrix.core.files import create_atomic, write_atomic
from mimatrix.launch.exit_causes import ExitCause
from mimatrix.launch.launcher import MemberState, Phase, TeamState
from mimatrix.processes.proc import Identity


@dataclass(frozen=True, slots=True)
class Order:
    """What a keeper has to start."""

    words: tuple[str, ...]
    environments: tuple[dict[str, str], ...]
    """The whole environment of each member, in the order of their ranks."""
    archive: str
    grace_s: float
    run_as: str
    groups: tuple[tuple[int, ...], ...] = ()
    restarts: int = 0
    others: bool = False


@dataclass(frozen=True, slots=True)
class Record:
    """How a team is, and who answers for that: what is said of members that run holds while those live."""

    team: TeamState
    keeper: Identity | None = None
    guards: tuple[Identity | None, ...] = ()
    refusal: str = ""
    """Why the members could not be started, for the one who asked for it."""


class TeamFolder:
    """The files of one team."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.work = path / "work"
        self.keeper_log = path / "keeper.log"
        self._order = path / "order.json"
        self._state = path / "state.json"

    def log(self, rank: int) -> Path:
        """The folder of one member's output."""
        return self.path / "logs" / str(rank)

    def write_order(self, order: Order) -> None:
        """Only its owner may read it: environments hold secrets."""
        with open(self._order, "x", encoding="utf-8", opener=_private) as file:
            json.dump(asdict(order), file)

    def read_order(self) -> Order:
        """What was written."""
        told = json.loads(self._order.read_text(encoding="utf-8"))
        told["groups"] = map(tuple, told.get("groups", ()))
        return Order(**told | {name: tuple(told[name]) for name in ("words", "environments", "groups")})

    def ranks(self) -> int:
        """How many members were ordered; 1 where that cannot be read any more."""
        try:
            return len(self.read_order().environments)
        except (ValueError, TypeError, KeyError):
            return 1

    def order_age_s(self, now_s: float) -> float:
        """How long ago somebody saw to the order, at this time of the day."""
        return now_s - self._order.stat().st_mtime

    def renew_order(self) -> None:
        """Let its age begin again: somebody sees to it now."""
        os.utime(self._order)

    def claim(self, record: Record) -> bool:
        """Write the first record; False where somebody else did so before, who alone may write then."""
        try:
            create_atomic(self._state, json.dumps(asdict(record)))
        except FileExistsError:
            return False
        return True

    def save(self, record: Record) -> None:
        """Replace the record; readers see the old one or the new one."""
        write_atomic(self._state, json.dumps(asdict(record)))

    def written_ns(self) -> int:
        """When the last record was written; 0 before the first."""
        try:
            return self._state.stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def read_record(self) -> Record | None:
        """The last record, or None before the first."""
        try:
            return _decode(json.loads(self._state.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError):
            return Record(all_lost(1, "what was written of it cannot be read"))


def all_lost(ranks: int, reason: str) -> TeamState:
    """A team of which nobody knows anything."""
    return TeamState((MemberState(Phase.LOST, ExitCause.lost(reason)),) * ranks)


def judge(record: Record, is_alive: Callable[[Identity], bool]) -> TeamState:
    """How a team is whose keeper is gone: a member that had not ended is lost as soon as its guard is gone, too."""
    guards = [*record.guards, *[None] * len(record.team.members)]
    reason = f"its keeper{f' (process {record.keeper.pid})' if record.keeper else ''} is gone"
    members = [
        member
        if member.phase in (Phase.EXITED, Phase.LOST) or (guard and is_alive(guard))
        else MemberState(Phase.LOST, ExitCause.lost(reason))
        for member, guard in zip(record.team.members, guards, strict=False)
    ]
    return TeamState(tuple(members), record.team.first_failure)


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _decode(told: dict[str, Any]) -> Record:
    team = told["team"]
    members = tuple(
        MemberState(Phase(member["phase"]), _cause(member["cause"]), member["restarts"]) for member in team["members"]
    )
    return Record(
        TeamState(members, team["first_failure"], team.get("returning", False)),
        _identity(told["keeper"]),
        tuple(map(_identity, told["guards"])),
        told["refusal"],
    )


def _identity(told: dict[str, int] | None) -> Identity | None:
    return None if told is None else Identity(**told)


def _cause(told: dict[str, Any] | None) -> ExitCause | None:
    return ExitCause.from_json(told) if told else None
