"""Teams on the machines of a Ray cluster. Where a member runs is our decision; Ray knows the nodes and carries calls.

On every node there is a keeper, an actor that goes on without us, which starts the members of that node by a local
launcher. What a team is made of, and what became of its members, is written down in our folder as well, since nodes go.
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
from mimatrix.launch.launcher import LogPart, NodeFacts, Team, TeamState
from mimatrix.launch.local.launch_spec import check_name, make_order
from mimatrix.launch.ray.driver_client import Answer, Archive, Line, Refused, Reply, Silent
from mimatrix.launch.ray.nodes import tell_apart
from mimatrix.launch.ray.split import Part, Sight, TeamRecord, first_record, judge_team, split
from mimatrix.launch.ray.store import TeamRecords

_HELLO_S = 3.0
_START_S = 25.0
_DROP_S, _AGAIN_S = 8.0, 1.0


class RayLauncher:
    """Starts teams on the nodes of the Ray cluster at `address` and tells what became of them.

    `environment` is that of the process that speaks with Ray, with the token; without it ours, as it is.
    """

    def __init__(self, folder: Path, address: str = "auto", environment: Mapping[str, str] | None = None) -> None:
        self._folder = folder.absolute()
        self._address = address
        self._environment = os.environ if environment is None else environment
        self._records = TeamRecords(self._folder)
        # Ours are few calls, all of them short but `start`: no two of them change one record at once.
        self._lock = threading.RLock()

    def nodes(self) -> tuple[NodeFacts, ...]:
        """Those whose keepers answer now. One on a node that Ray has just seen first may need a while."""
        return tuple(node for node in self._hear_nodes()[0].values() if node.devices)

    def start(self, team: Team) -> None:
        """Start all members, or none. A team of this name that was started already is left as it is."""
        check_name(team.name)
        with self._lock:
            known = self._records.read(team.name)
            if known and known.is_dropped:
                self._drop(known)
            elif known:
                return
            parts = self._split(team)
            record = first_record(team, parts)
            self._records.write(record)
            calls = {node: (part, Archive(team.archive.absolute())) for node, part in parts.items()}
            try:
                replies = self._line.ask(calls, "start", _START_S)
            except WorldError:
                self._give_up(record)
                raise
            self._conclude_start(record, replies)

    def states(self) -> Mapping[str, TeamState]:
        """All teams that are known by name, also those that an earlier launcher started; until they are forgotten."""
        with self._lock:
            records = self._records.all()
            for record in records:
                if record.is_dropped:
                    with suppress(WorldError):
                        self._drop(record, _AGAIN_S)
            kept = [record for record in records if not record.is_dropped]
            return {record.name: record.state for record in self._look(kept)}

    def end(self, team: str, *, now: bool = False) -> None:
        """Tell all members to end, and kill what is left after the grace; `now`: kill at once. Whole process trees."""
        with self._lock:
            record = self._read(team)
            if record.state.has_ended:
                return
            if not record.is_told:
                record = replace(record, is_told=True)
                self._records.write(record)
            replies = self._line.ask(dict.fromkeys(record.unended(), (team, now)), "end")
            gone = self._gone(replies) if _silent(replies) else {}
            _raise_for({node: reply for node, reply in replies.items() if node not in gone}, record)

    def read_log(self, team: str, rank: int, offset: int, most: int = 65_536) -> LogPart:
        """Output of a member from `offset` on, below 0 from its end; from the oldest where that was dropped already."""
        record = self._read(team)
        if not 0 <= rank < len(record.places):
            raise UserError(f'team "{team}" has no rank {rank}; use 0 to {len(record.places) - 1}')
        place = record.places[rank]
        within = record.ranks_on(place.id).index(rank)
        replies = self._line.ask({place.id: (team, within, offset, most)}, "read_log")
        _raise_for(replies, record)
        part = replies[place.id]
        assert isinstance(part, Answer), "else it was raised"
        found: LogPart = part.value
        return found

    def forget(self, team: str) -> None:
        """Remove what is kept of a team that has ended. One that is not known is forgotten already."""
        check_name(team)
        with self._lock:
            record = self._records.read(team)
            if record is None:
                return
            if not self._look([record])[0].state.has_ended:
                raise UserError(f'team "{team}" has not ended; end it first')
            self._drop(record)

    def close(self) -> None:
        """End the process that speaks with Ray; keepers and teams go on."""
        if "_line" in self.__dict__:
            self._line.close()

    @cached_property
    def _line(self) -> Line:
        place = f"mimatrix-{self._records.place()}"
        return Line(self._address, place, self._environment, self._folder / "ray.log")

    def _hear_nodes(self) -> tuple[dict[str, NodeFacts], dict[str, str]]:
        """The nodes that answer, by their ids, and what they call themselves."""
        alive = [raylet.id for raylet in self._line.raylets() if raylet.is_alive]
        replies = self._line.ask(dict.fromkeys(alive, ()), "hello", _HELLO_S)
        found: dict[str, NodeFacts] = {node: each.value for node, each in replies.items() if isinstance(each, Answer)}
        return tell_apart(found), {node: facts.name for node, facts in found.items()}

    def _split(self, team: Team) -> dict[str, Part]:
        """The parts of a team, of which we know that each could be started on its node."""
        nodes, own_names = self._hear_nodes()
        if not team.members:
            make_order(team, next(iter(nodes.values()), NodeFacts("", "", ())))
        parts = split(team, nodes, own_names, uuid.uuid4().hex)
        for node, part in parts.items():
            # The user is one of that machine, and the archive is still on this one.
            here = replace(part.team, run_as="", archive=team.archive)
            make_order(here, replace(nodes[node], name=own_names[node]))
        return parts

    def _conclude_start(self, record: TeamRecord, replies: Mapping[str, Reply]) -> None:
        """All have started, or what has is undone and the first reason is raised."""
        if all(isinstance(reply, Answer) for reply in replies.values()):
            self._records.write(replace(record, has_started=True))
            return
        self._give_up(record)
        _raise_for(replies, record)

    def _give_up(self, record: TeamRecord) -> None:
        """Whatever cannot be dropped now is dropped when its node answers again."""
        with suppress(WorldError):
            self._drop(record)

    def _look(self, records: list[TeamRecord]) -> list[TeamRecord]:
        """The same after a look at the nodes of those that have not ended, who are told if they have to end."""
        going = [record for record in records if not record.state.has_ended]
        wanted = {node: tuple(each.name for each in going if node in each.ids) for each in going for node in each.ids}
        if not wanted:
            return records
        replies = self._line.ask({node: (names,) for node, names in wanted.items()}, "states")
        gone = self._gone(replies) if _silent(replies) else {}
        return [self._judge(record, replies, gone) if record in going else record for record in records]

    def _judge(self, record: TeamRecord, replies: Mapping[str, Reply], gone: Mapping[str, str]) -> TeamRecord:
        answers = {node: each.value for node in record.ids if isinstance(each := replies[node], Answer)}
        sight = Sight(gone, {node: parts[record.name] for node, parts in answers.items()})
        judged = judge_team(record, sight, self._records.age_s(record), time.time())
        if judged != record:
            self._records.write(judged)
        if judged.cause and not judged.state.has_ended:
            # Who does not hear it is told at the next look.
            self._line.ask(dict.fromkeys(judged.unended(), (judged.name, False, judged.cause)), "end")
        return judged

    def _gone(self, nodes: Iterable[str]) -> dict[str, str]:
        """Those of the nodes that Ray has given up, and why."""
        raylets = {raylet.id: raylet for raylet in self._line.raylets()}
        return {
            node: raylets[node].ending if node in raylets else "Ray does not know it any more"
            for node in nodes
            if node not in raylets or not raylets[node].is_alive
        }

    def _drop(self, record: TeamRecord, within_s: float = _DROP_S) -> None:
        """Forget a team on all its nodes, and then here."""
        if not record.is_dropped:
            self._records.write(replace(record, is_dropped=True))
        replies = self._line.ask(dict.fromkeys(record.ids, (record.name, record.order)), "drop", within_s)
        gone = self._gone(replies) if _silent(replies) else {}
        _raise_for({node: reply for node, reply in replies.items() if node not in gone}, record)
        self._records.remove(record.name)

    def _read(self, team: str) -> TeamRecord:
        check_name(team)
        record = self._records.read(team)
        if record is None or record.is_dropped:
            known = [each.name for each in self._records.all() if not each.is_dropped]
            raise UserError(f'there is no team "{team}"{nearest(team, known) if known else "; none was started"}')
        return record


def _silent(replies: Mapping[str, Reply]) -> bool:
    return any(isinstance(reply, Silent) for reply in replies.values())


def _raise_for(replies: Mapping[str, Reply], record: TeamRecord) -> None:
    """The first reason why a node did not do what it was asked; what it says itself goes before silence."""
    for reply in replies.values():
        if isinstance(reply, Refused):
            raise reply.error
    for node, reply in replies.items():
        if isinstance(reply, Silent):
            name = record.places[record.ranks_on(node)[0]].node
            raise WorldError(f'node {name} does not answer for team "{record.name}" ({reply.reason})')
