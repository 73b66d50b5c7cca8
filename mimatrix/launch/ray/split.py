"""A team on several nodes: split into a part for each, and put together again from what the nodes report. Pure values.

A *part* is the members of a team on one node. There it is a team of its own, whose ranks begin at 0.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from mimatrix.launch.devices import NodeInfo
from mimatrix.launch.exit_causes import EndedFor, ExitCause
from mimatrix.launch.launcher import MemberState, Phase, Team, TeamState
from mimatrix.launch.ray.nodes import join_names
from mimatrix.launch.start_failure import StartError, StartFailure

ABANDONED_S = 45.0
"""Longer than a launcher takes to start a team."""
_ENDED = (Phase.EXITED, Phase.LOST)


@dataclass(frozen=True, slots=True)
class FirstFailure:
    """The failure that ends a team: which rank, and when that was seen on its node's clock."""

    rank: int
    at_s: float


@dataclass(frozen=True, slots=True)
class NodePart:
    """What one node is to start."""

    team: Team
    """With the members of this node alone."""
    ranks: tuple[int, ...]
    """Theirs in the whole team."""
    peers: tuple[str, ...]
    """The ids of the other nodes of the team."""
    start_id: str
    """The id of this attempt to start: one that was abandoned must not begin when it arrives late."""


@dataclass(frozen=True, slots=True)
class PartState:
    """What one node knows about its part."""

    team: TeamState
    """With the ranks of the part."""
    failure: FirstFailure | None = None
    """With the rank in the whole team: a failure here, or one that another node reported."""


@dataclass(frozen=True, slots=True)
class MemberLocation:
    """Where a member was started."""

    node: str
    id: str


@dataclass(frozen=True, slots=True)
class TeamRecord:
    """What is recorded about a team on the server's side. It outlives nodes."""

    name: str
    start_id: str
    locations: tuple[MemberLocation, ...]
    members: tuple[MemberState, ...]
    """As they were last reported."""
    has_started: bool = False
    """Whether all of them were started, and the launcher knew it."""
    is_stopping: bool = False
    """Whether the launcher was told to end it."""
    is_dropped: bool = False
    """Whether it is to be forgotten, on all nodes that still know it."""
    failure: FirstFailure | None = None
    has_groups: bool = False
    """Whether a failure ends only its group, which is on one node."""
    start_failure: StartFailure | None = None

    @property
    def state(self) -> TeamState:
        """How the team is."""
        first = self.failure.rank if self.failure else None
        return TeamState(self.members, first, start_failure=self.start_failure)

    @property
    def ids(self) -> tuple[str, ...]:
        """The nodes, each once, in the order of their first ranks."""
        return tuple(dict.fromkeys(location.id for location in self.locations))

    def ranks_on(self, node: str) -> tuple[int, ...]:
        """Return the ranks on the node of this id."""
        return tuple(rank for rank, location in enumerate(self.locations) if location.id == node)

    def unended(self) -> tuple[str, ...]:
        """Return the nodes that have members that have not ended, as far as known."""
        return tuple(
            node for node in self.ids if any(self.members[rank].phase not in _ENDED for rank in self.ranks_on(node))
        )


@dataclass(frozen=True, slots=True)
class NodeReports:
    """What the nodes and Ray reported at one moment."""

    gone: Mapping[str, str] = field(default_factory=dict)
    """Ids of nodes that Ray has lost, and why."""
    parts: Mapping[str, PartState | None] = field(default_factory=dict)
    """By the id of each node that answered; None if it knows no such team. A node in neither is silent."""


def split(
    team: Team, nodes: Mapping[str, NodeInfo], own_names: Mapping[str, str], start_id: str
) -> dict[str, NodePart]:
    """Return a part for each node that the members name, by its id. `own_names` are what the nodes call themselves."""
    ids = {node.name: known for known, node in nodes.items()}
    for member in team.members:
        if member.node not in ids:
            raise StartError(
                f'there is no node "{member.node}" here; those that answer are {join_names(nodes.values())}',
                is_transient=True,  # a node that does not answer now may do so in a moment
            )
    ranks: dict[str, list[int]] = {}
    for rank, member in enumerate(team.members):
        ranks.setdefault(ids[member.node], []).append(rank)
    whole = team if _are_apart(team.groups, ranks.values()) else replace(team, groups=(), restarts=0)
    return {
        known: NodePart(_cut(whole, own_names[known], mine), tuple(mine), _others(ranks, known), start_id)
        for known, mine in ranks.items()
    }


def first_record(team: Team, parts: Mapping[str, NodePart]) -> TeamRecord:
    """Return the record of a team that is about to be started."""
    (start_id,) = {part.start_id for part in parts.values()}
    ids = {rank: known for known, part in parts.items() for rank in part.ranks}
    locations = tuple(MemberLocation(member.node, ids[rank]) for rank, member in enumerate(team.members))
    has_groups = any(part.team.groups for part in parts.values())
    starting = (MemberState(Phase.STARTING),) * len(locations)
    return TeamRecord(team.name, start_id, locations, starting, has_groups=has_groups)


def judge_team(record: TeamRecord, reports: NodeReports, age_s: float, now_s: float) -> TeamRecord:
    """Return what is known about a team after its nodes reported; `age_s` is the time since it was started."""
    has_started = record.has_started or all(reports.parts.get(node) for node in record.ids)
    is_late = not has_started and age_s >= ABANDONED_S
    members = list(record.members)
    for node in record.ids:
        ranks = record.ranks_on(node)
        for rank, member in zip(ranks, _seen(record, node, reports, has_started, is_late), strict=True):
            if members[rank].phase not in _ENDED or member.restarts > members[rank].restarts:
                members[rank] = member
    failure = record.failure or _find_failure(record, tuple(members), reports, now_s)
    start_failures = (part.team.start_failure for part in reports.parts.values() if part)
    return replace(
        record,
        members=tuple(_explained(member, failure) for member in members),
        has_started=has_started,
        failure=failure,
        start_failure=record.start_failure or next(filter(None, start_failures), None),
    )


def find_local_failure(state: TeamState, part: NodePart, now_s: float) -> FirstFailure | None:
    """Return the failure in a part, if there is one that ends more than its group."""
    if part.team.groups:
        return None
    first, ranks = state.first_failure, part.ranks
    if first is None:
        first = next((rank for rank, member in enumerate(state.members) if member.phase is Phase.LOST), None)
    return None if first is None else FirstFailure(ranks[first], now_s)


def _are_apart(groups: Iterable[Iterable[int]], ranks: Iterable[Iterable[int]]) -> bool:
    """Return whether every group is on one node; a single node cannot end a group that is on several."""
    nodes = [set(on_node) for on_node in ranks]
    return all(any(set(group) <= on_node for on_node in nodes) for group in groups)


def _cut(team: Team, node: str, ranks: Sequence[int]) -> Team:
    members = tuple(replace(team.members[rank], node=node) for rank in ranks)
    groups = tuple(tuple(map(ranks.index, group)) for group in team.groups if group[0] in ranks)
    # The path is the server's. The node puts the archive where it likes, and fills in that.
    has_remote_members = len(ranks) < len(team.members)
    return replace(
        team, members=members, groups=groups, has_remote_members=has_remote_members, archive=Path(team.archive.name)
    )


def _others(known: Mapping[str, object], mine: str) -> tuple[str, ...]:
    return tuple(node for node in known if node != mine)


def _seen(
    record: TeamRecord, node: str, reports: NodeReports, has_started: bool, is_late: bool
) -> tuple[MemberState, ...]:
    """Return the members of one node, in the order of their ranks."""
    ranks = record.ranks_on(node)
    name = record.locations[ranks[0]].node
    if node in reports.gone:
        return _lost(ranks, f"node {name} is gone{reports.gone[node] and f' ({reports.gone[node]})'}")
    part = reports.parts.get(node)
    if part and len(part.team.members) == len(ranks):
        return tuple(_renumbered(member, ranks) for member in part.team.members)
    if node in reports.parts and has_started:
        return _lost(ranks, f"node {name} does not know it any more")
    if is_late:
        return _lost(ranks, "its launcher was gone before all members were started")
    return tuple(record.members[rank] for rank in ranks)


def _lost(ranks: tuple[int, ...], reason: str) -> tuple[MemberState, ...]:
    return (MemberState(Phase.LOST, ExitCause.lost(reason)),) * len(ranks)


def _find_failure(
    record: TeamRecord, members: tuple[MemberState, ...], reports: NodeReports, now_s: float
) -> FirstFailure | None:
    """Return the first failure that a node saw. One after the team was told to end does not count."""
    reported = [part.failure for part in reports.parts.values() if part and part.failure]
    if reported:
        return min(reported, key=lambda failure: failure.at_s)
    if record.is_stopping or (record.has_groups and any(member.phase not in _ENDED for member in members)):
        return None
    lost = [rank for rank, member in enumerate(members) if member.phase is Phase.LOST]
    # If nothing that we know of told a member to end, its node agent was gone, and so it was killed.
    killed = [rank for rank, member in enumerate(members) if member.phase is Phase.EXITED and member.code]
    return FirstFailure((lost or killed)[0], now_s) if lost or killed else None


def _renumbered(member: MemberState, ranks: Sequence[int]) -> MemberState:
    """Return a member with the ranks of the whole team in its cause; a node numbers its own members."""
    return replace(member, cause=member.cause.renumber(ranks.__getitem__)) if member.cause else member


def _explained(member: MemberState, first: FirstFailure | None) -> MemberState:
    """Return a member with the first failure as its cause; its node may not have known it when it ended the member."""
    ended = member.cause
    if first is None or ended is None or member.phase is not Phase.EXITED or ended.ended_for is EndedFor.NONE:
        return member
    return replace(member, cause=replace(ended, ended_for=EndedFor.PEER, because_of=first.rank))
