"""What the server records about teams on Ray: `place`, a name for this directory, and a file for each team."""

import json
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mimatrix.core.errors import WorldError
from mimatrix.core.files import write_atomic
from mimatrix.launch.ray.messages import decode_failure, encode_failure
from mimatrix.launch.ray.split import MemberLocation, TeamRecord
from mimatrix.launch.start_failure import StartFailure
from mimatrix.launch.team_json import (
    DECODE_ERRORS,
    check_version,
    decode_member_state,
    encode_member_state,
)

RECORD_VERSION = 1


class TeamRecords:
    """The files of one directory."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "teams"
        self._namespace = folder / "place"

    def namespace(self) -> str:
        """Return the name of this directory among all that use the same Ray cluster; it is made once."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._namespace.exists():
                write_atomic(self._namespace, uuid.uuid4().hex[:12])
            return self._namespace.read_text(encoding="utf-8").strip()
        except OSError as error:
            raise WorldError(f"{self._namespace} cannot be written ({error.strerror})") from None

    def read(self, team: str) -> TeamRecord | None:
        """Return the record of a team; None if it is unknown.

        Raises:
            WorldError: The file is damaged, or another version of MiMatrix wrote it.
        """
        path = self._file(team)
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            check_version(data, RECORD_VERSION, path)
            return _decode(data)
        except FileNotFoundError:
            return None
        except DECODE_ERRORS:
            raise WorldError(f"{path} is damaged; remove it to forget the team") from None

    def all(self) -> tuple[list[TeamRecord], dict[str, str]]:
        """Return the records of all teams by name, and for each that cannot be read the sentence that says why."""
        names = sorted(path.stem for path in self._folder.glob("*.json")) if self._folder.is_dir() else []
        records, unreadable = [], {}
        for name in names:
            try:
                record = self.read(name)
            except WorldError as error:
                unreadable[name] = str(error)
            else:
                records += [record] if record else []
        return records, unreadable

    def write(self, record: TeamRecord) -> None:
        """Replace a record; readers see the old one or the new one."""
        try:
            write_atomic(self._file(record.name), json.dumps(_encode(record)))
        except OSError as error:
            raise WorldError(f'the record of team "{record.name}" cannot be written ({error.strerror})') from None

    def age_s(self, record: TeamRecord) -> float:
        """Return the time since a record was written."""
        try:
            return time.time() - self._file(record.name).stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def remove(self, team: str) -> None:
        """Remove the record of a team, if there is one."""
        self._file(team).unlink(missing_ok=True)

    def _file(self, team: str) -> Path:
        return self._folder / f"{team}.json"


def _encode(record: TeamRecord) -> dict[str, Any]:
    return {
        "version": RECORD_VERSION,
        "name": record.name,
        "start_id": record.start_id,
        "locations": [{"node": location.node, "id": location.id} for location in record.locations],
        "members": [encode_member_state(member) for member in record.members],
        "has_started": record.has_started,
        "is_stopping": record.is_stopping,
        "is_dropped": record.is_dropped,
        "failure": encode_failure(record.failure),
        "has_groups": record.has_groups,
        "start_failure": record.start_failure.to_json() if record.start_failure else None,
    }


def _decode(data: Mapping[str, Any]) -> TeamRecord:
    return TeamRecord(
        name=str(data["name"]),
        start_id=str(data["start_id"]),
        locations=tuple(MemberLocation(str(each["node"]), str(each["id"])) for each in data["locations"]),
        members=tuple(map(decode_member_state, data["members"])),
        has_started=bool(data["has_started"]),
        is_stopping=bool(data["is_stopping"]),
        is_dropped=bool(data["is_dropped"]),
        failure=decode_failure(data["failure"]),
        has_groups=bool(data["has_groups"]),
        start_failure=None if data["start_failure"] is None else StartFailure.from_json(data["start_failure"]),
    )
