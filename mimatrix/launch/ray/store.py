"""What the server's side writes down of teams on Ray: `place`, a word for this folder, and a file for each team."""

import json
import time
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mimatrix.core.errors import WorldError
from mimatrix.core.files import write_atomic
from mimatrix.launch.exit_causes import ExitCause
from mimatrix.launch.launcher import MemberState, Phase
from mimatrix.launch.ray.split import Cause, Place, TeamRecord


class TeamRecords:
    """The files of one folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "teams"
        self._place = folder / "place"

    def place(self) -> str:
        """Names this folder among all that use the same Ray cluster; made once."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._place.exists():
                write_atomic(self._place, uuid.uuid4().hex[:12])
            return self._place.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise WorldError(f"{self._place} cannot be written ({error.strerror})") from None

    def read(self, team: str) -> TeamRecord | None:
        """None of a team that is not known."""
        try:
            return _decode(json.loads(self._file(team).read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (ValueError, TypeError, KeyError):
            raise WorldError(f"{self._file(team)} cannot be read any more; remove it to forget the team") from None

    def all(self) -> list[TeamRecord]:
        """In the order of their names."""
        names = sorted(path.stem for path in self._folder.glob("*.json")) if self._folder.is_dir() else []
        return [record for record in map(self.read, names) if record]

    def write(self, record: TeamRecord) -> None:
        """At once and as a whole."""
        try:
            write_atomic(self._file(record.name), json.dumps(asdict(record)))
        except OSError as error:
            raise WorldError(f'what is known of team "{record.name}" cannot be written ({error.strerror})') from None

    def age_s(self, record: TeamRecord) -> float:
        """Since it was written."""
        try:
            return time.time() - self._file(record.name).stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def remove(self, team: str) -> None:
        """Whether it is there or not."""
        self._file(team).unlink(missing_ok=True)

    def _file(self, team: str) -> Path:
        return self._folder / f"{team}.json"


def _decode(told: dict[str, Any]) -> TeamRecord:
    members = tuple(
        MemberState(Phase(member["phase"]), _cause(member["cause"]), member["restarts"]) for member in told["members"]
    )
    places = tuple(Place(**place) for place in told["places"])
    cause = Cause(**told["cause"]) if told["cause"] else None
    return TeamRecord(**told | {"members": members, "places": places, "cause": cause})


def _cause(told: dict[str, Any] | None) -> ExitCause | None:
    return ExitCause.from_json(told) if told else None
