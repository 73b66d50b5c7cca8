"""Teams on the machines of a Ray cluster. Ray knows the nodes and carries calls; where a member runs is our decision.

On every node there is an agent, an actor that keeps running without us, which starts the members of that node by a
local launcher. Teams and what became of their members are recorded in our directory as well, since nodes are lost.
"""

import os
import threading
import time
import uuid
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from mimatrix.core.errors import UserError, WorldError, nearest
from mimatrix.launch.devices import NodeInfo
from mimatrix.launch.launcher import LogPart, Team, TeamState
from mimatrix.launch.local.launch_spec import validate, validate_name
from mimatrix.launch.ray.driver_client import Answer, DriverClient, NodeReply, Refused, Silent
from mimatrix.launch.ray.messages import decode_log_part, decode_part_state, encode_failure, encode_part
from mimatrix.launch.ray.nodes import tell_apart
from mimatrix.launch.ray.split import NodePart, NodeReports, TeamRecord, first_record, judge_team, split
from mimatrix.launch.ray.store import TeamRecords
from mimatrix.launch.start_failure import StartError
from mimatrix.launch.team_json import decode_node

_HELLO_S = 3.0
_START_S = 25.0
_DROP_S, _AGAIN_S = 8.0, 1.0


class RayLauncher:
    """Starts teams on the nodes of the Ray cluster at `address` and reports what became of them.

    `environment` is that of the process that speaks with Ray, with the token; our own if omitted.
    """

    def __init__(self, folder: Path, address: str = "auto", environment: Mapping[str, str] | None = None) -> None:
        self._folder = folder.absolute()
        self._address = address
        self._environment = os.environ if environment is None else environment
        self._records = TeamRecords(self._folder)
        # No two calls change one record at once. Not held while nodes start a team, which takes long.
        self._lock = threading.RLock()

    def nodes(self) -> tuple[NodeInfo, ...]:
        """Return the nodes whose agents answer now. On a node that is new to Ray, that may take a while."""
        return tuple(node for node in self.find_nodes()[0].values() if node.devices)

    def start(self, team: Team) -> None:
        """Start all members, or none. A team of this name that was started already is left as it is."""
        validate_name(team.name)
        with self._lock:
            known = self._records.read(team.name)
            if known and known.is_dropped:
                self._drop(known)
            elif known:
                return
        parts = self._split(team)
        with self._lock:
            if self._records.read(team.name):
                return  # another thread was faster
            record = first_record(team, parts)
            self._records.write(record)
        calls = {node: {"part": encode_part(part)} for node, part in parts.items()}
        try:
            replies = self.driver.ask(calls, "start", _START_S, archive=team.archive.absolute())
        except WorldError as error:
            self._abandon(record)
            raise StartError(str(error), is_transient=True) from None
        self._conclude_start(record, replies)

    def states(self) -> Mapping[str, TeamState]:
        """Return all teams by name, also those that an earlier launcher started, until they are forgotten."""
        with self._lock:
            records, unreadable = self._records.all()
            for record in records:
                if record.is_dropped:
                    with suppress(WorldError):
                        self._drop(record, _AGAIN_S)
            kept = [record for record in records if not record.is_dropped]
            states = {record.name: record.state for record in self._look(kept)}
            return states | {name: TeamState((), unreadable=sentence) for name, sentence in unreadable.items()}

    def end(self, team: str, *, now: bool = False) -> None:
        """Send SIGTERM to all processes of a team, and SIGKILL after the grace period; `now`: SIGKILL at once."""
        with self._lock:
            record = self._read(team)
            if record.state.has_ended:
                return
            if not record.is_stopping:
                record = replace(record, is_stopping=True)
                self._records.write(record)
            replies = self.driver.ask({node: {"team": team, "now": now} for node in record.unended()}, "end")
            gone = self._gone(replies) if _silent(replies) else {}
            _raise_for({node: reply for node, reply in replies.items() if node not in gone}, record)

    def read_log(self, team: str, rank: int, offset: int, most: int = 65_536) -> LogPart:
        """Return output of a member from `offset` on, below 0 from its end; from the oldest byte that is kept."""
        record = self._read(team)
        if not 0 <= rank < len(record.locations):
            raise UserError(f'team "{team}" has no rank {rank}; use 0 to {len(record.locations) - 1}')
        location = record.locations[rank]
        within = record.ranks_on(location.id).index(rank)
        arguments = {"team": team, "rank": within, "offset": offset, "most": most}
        replies = self.driver.ask({location.id: arguments}, "read_log")
        _raise_for(replies, record)
        reply = replies[location.id]
        assert isinstance(reply, Answer), "otherwise an error was raised"
        return decode_log_part(reply.value)

    def forget(self, team: str) -> None:
        """Remove what is kept of a team that has ended. One that is unknown is forgotten already."""
        validate_name(team)
        with self._lock:
            record = self._records.read(team)
            if record is None:
                return
            if not self._look([record])[0].state.has_ended:
                raise UserError(f'team "{team}" has not ended; end it first')
            self._drop(record)

    def close(self) -> None:
        """End the process that speaks with Ray; agents and teams keep running."""
        if "driver" in self.__dict__:
            self.driver.close()

    @cached_property
    def driver(self) -> DriverClient:
        """The process that speaks with Ray."""
        namespace = f"mimatrix-{self._records.namespace()}"
        return DriverClient(self._address, namespace, self._environment, self._folder / "ray.log")

    def find_nodes(self) -> tuple[dict[str, NodeInfo], dict[str, str]]:
        """Return the nodes that answer, by their ids, and what they call themselves."""
        alive = [raylet.id for raylet in self.driver.raylets() if raylet.is_alive]
        replies = self.driver.ask({node: {} for node in alive}, "describe", _HELLO_S)
        nodes = {node: decode_node(reply.value) for node, reply in replies.items() if isinstance(reply, Answer)}
        return tell_apart(nodes), {node: info.name for node, info in nodes.items()}

    def _split(self, team: Team) -> dict[str, NodePart]:
        """Return the parts of a team, each of which could be started on its node as far as we know."""
        validate(team, None)
        nodes, own_names = self.find_nodes()
        parts = split(team, nodes, own_names, uuid.uuid4().hex)
        for node, part in parts.items():
            # The user is one of that machine, and the archive is still on this one.
            here = replace(part.team, run_as="", archive=team.archive)
            validate(here, replace(nodes[node], name=own_names[node]))
        return parts

    def _conclude_start(self, record: TeamRecord, replies: Mapping[str, NodeReply]) -> None:
        """Note that all members were started; otherwise undo what was, and raise the first reason."""
        if all(isinstance(reply, Answer) for reply in replies.values()):
            with self._lock:
                current = self._records.read(record.name)
                if current and current.start_id == record.start_id:
                    self._records.write(replace(current, has_started=True))
            return
        self._abandon(record)
        try:
            _raise_for(replies, record)
        except StartError:
            raise
        except WorldError as error:  # silence, which may end
            raise StartError(str(error), is_transient=True) from None

    def _abandon(self, record: TeamRecord) -> None:
        """Drop a team; parts that cannot be dropped now are dropped when their nodes answer again."""
        with self._lock:
            self._mark_dropped(record)
        with suppress(WorldError):
            # Not under the lock: nodes that are silent make it take long, and other teams are looked at meanwhile.
            self._drop_on_nodes(record, _DROP_S)
            with self._lock:
                current = self._records.read(record.name)
                if current and current.start_id == record.start_id:
                    self._records.remove(record.name)

    def _look(self, records: list[TeamRecord]) -> list[TeamRecord]:
        """Return the records after asking the nodes of teams that have not ended; parts that must end are told so."""
        going = [record for record in records if not record.state.has_ended]
        wanted = {
            node: {"teams": [other.name for other in going if node in other.ids]}
            for record in going
            for node in record.ids
        }
        if not wanted:
            return records
        replies = self.driver.ask(wanted, "states")
        gone = self._gone(replies) if _silent(replies) else {}
        return [self._judge(record, replies, gone) if record in going else record for record in records]

    def _judge(self, record: TeamRecord, replies: Mapping[str, NodeReply], gone: Mapping[str, str]) -> TeamRecord:
        answers = {node: reply.value for node in record.ids if isinstance(reply := replies[node], Answer)}
        parts = {node: decode_part_state(states[record.name]) for node, states in answers.items()}
        judged = judge_team(record, NodeReports(gone, parts), self._records.age_s(record), time.time())
        if judged != record:
            self._records.write(judged)
        if judged.failure and not judged.state.has_ended:
            # A node that misses it is told at the next look.
            arguments = {"team": judged.name, "now": False, "failure": encode_failure(judged.failure)}
            self.driver.ask(dict.fromkeys(judged.unended(), arguments), "end")
        return judged

    def _gone(self, nodes: Iterable[str]) -> dict[str, str]:
        """Return those of the nodes that Ray has lost, and why."""
        raylets = {raylet.id: raylet for raylet in self.driver.raylets()}
        return {
            node: raylets[node].ending if node in raylets else "Ray does not know it any more"
            for node in nodes
            if node not in raylets or not raylets[node].is_alive
        }

    def _drop(self, record: TeamRecord, within_s: float = _DROP_S) -> None:
        """Forget a team on all its nodes, then here."""
        self._mark_dropped(record)
        self._drop_on_nodes(record, within_s)
        self._records.remove(record.name)

    def _mark_dropped(self, record: TeamRecord) -> None:
        if not record.is_dropped:
            self._records.write(replace(record, is_dropped=True))

    def _drop_on_nodes(self, record: TeamRecord, within_s: float) -> None:
        """Have all nodes that are there forget a team; raise if one does not say that it has."""
        arguments = {"team": record.name, "start_id": record.start_id}
        replies = self.driver.ask(dict.fromkeys(record.ids, arguments), "drop", within_s)
        gone = self._gone(replies) if _silent(replies) else {}
        _raise_for({node: reply for node, reply in replies.items() if node not in gone}, record)

    def _read(self, team: str) -> TeamRecord:
        validate_name(team)
        record = self._records.read(team)
        if record is None or record.is_dropped:
            known = [other.name for other in self._records.all()[0] if not other.is_dropped]
            raise UserError(f'there is no team "{team}"{nearest(team, known) if known else "; none was started"}')
        return record


def _silent(replies: Mapping[str, NodeReply]) -> bool:
    return any(isinstance(reply, Silent) for reply in replies.values())


def _raise_for(replies: Mapping[str, NodeReply], record: TeamRecord) -> None:
    """Raise the first reason why a node did not do what it was asked; what it says itself comes before silence."""
    for reply in replies.values():
        if isinstance(reply, Refused):
            raise reply.error
    for node, reply in replies.items():
        if isinstance(reply, Silent):
            name = record.locations[record.ranks_on(node)[0]].node
            raise WorldError(f'node {name} does not answer for team "{record.name}" ({reply.reason})')
