"""A team on several nodes: cut into a part for each, and put together again from what the nodes say. Nothing is done.

A *part* is the members of a team on one node. There it is a team of its own, whose ranks begin at 0.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from mimatrix.core.errors import UserError
from mimatrix.launch.exit_causes import EndedFor, ExitCause
from mimatrix.launch.launcher import MemberState, NodeFacts, Phase, Team, TeamState
from mimatrix.launch.ray.nodes import named

ABANDONED_S = 45.0
"""Longer than a launcher that lives takes to start a team."""
_ENDED = (Phase.EXITED, Phase.LOST)


@dataclass(frozen=True, slots=True)
class Cause:
    """The failure that ends a team: which rank, and when that was seen on its node's clock."""

    rank: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Part:
    """What one node is to start."""

    team: Team
    """With the members of this node alone."""
    ranks: tuple[int, ...]
    """Theirs in the whole team."""
    peers: tuple[str, ...]
    """The ids of the other nodes of the team."""
    order: str
    """Of this start: one that was given up must not begin when it arrives late."""


@dataclass(frozen=True, slots=True)
class PartState:
    """What one node knows of its part."""

    team: TeamState
    """With the ranks of the part."""
    cause: Cause | None = None
    """With the rank in the whole team: of a failure here, or of one that another node told of."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a member was started."""

    node: str
    id: str


@dataclass(frozen=True, slots=True)
class TeamRecord:
    """What is written down of a team on the server's side. It outlives nodes."""

    name: str
    order: str
    places: tuple[Place, ...]
    members: tuple[MemberState, ...]
    """As they were when they were heard of last."""
    has_started: bool = False
    """All of them were, and the launcher knew it."""
    is_told: bool = False
    """Somebody wanted it to end."""
    is_dropped: bool = False
    """It is to be forgotten, on all nodes that still know it."""
    cause: Cause | None = None
    has_groups: bool = False
    """A failure ends its group, which is on one node, and no more."""

    @property
    def state(self) -> TeamState:
        """How the team is."""
        return TeamState(self.members, self.cause.rank if self.cause else None)

    @property
    def ids(self) -> tuple[str, ...]:
        """The nodes, each once, in the order of their first ranks."""
        return tuple(dict.fromkeys(place.id for place in self.places))

    def ranks_on(self, node: str) -> tuple[int, ...]:
        """Of the members on the node of this id."""
        return tuple(rank for rank, place in enumerate(self.places) if place.id == node)

    def unended(self) -> tuple[str, ...]:
        """The nodes that have members that go on, as far as known."""
        return tuple(
            node for node in self.ids if any(self.members[rank].phase not in _ENDED for rank in self.ranks_on(node))
        )


@dataclass(frozen=True, slots=True)
class Sight:
    """What could be learnt of the nodes at one moment."""

    gone: Mapping[str, str] = field(default_factory=dict)
    """Ids of nodes that Ray has given up, and why."""
    parts: Mapping[str, PartState | None] = field(default_factory=dict)
    """Of those that answered; None from one that knows no such team. A node in neither is silent."""


def split(team: Team, nodes: Mapping[str, NodeFacts], own_names: Mapping[str, str], order: str) -> dict[str, Part]:
    """A part for each node that the members name, by its id. `own_names` are what the nodes call themselves."""
    ids = {node.name: known for known, node in nodes.items()}
    for member in team.members:
        if member.node not in ids:
            raise UserError(f'there is no node "{member.node}" here; those that answer are {named(nodes.values())}')
    ranks: dict[str, list[int]] = {}
    for rank, member in enumerate(team.members):
        ranks.setdefault(ids[member.node], []).append(rank)
    whole = team if _are_apart(team.groups, ranks.values()) else replace(team, groups=(), restarts=0)
    return {
        known: Part(_cut(whole, own_names[known], mine), tuple(mine), _others(ranks, known), order)
        for known, mine in ranks.items()
    }


def first_record(team: Team, parts: Mapping[str, Part]) -> TeamRecord:
    """Of a team that is about to be started."""
    (order,) = {part.order for part in parts.values()}
    ids = {rank: known for known, part in parts.items() for rank in part.ranks}
    places = tuple(Place(member.node, ids[rank]) for rank, member in enumerate(team.members))
    has_groups = any(part.team.groups for part in parts.values())
    starting = (MemberState(Phase.STARTING),) * len(places)
    return TeamRecord(team.name, order, places, starting, has_groups=has_groups)


def judge_team(record: TeamRecord, sight: Sight, age_s: float, now_s: float) -> TeamRecord:
    """What is known of a team after a look at its nodes; `age_s` is the age of the order to start it."""
    has_started = record.has_started or all(sight.parts.get(node) for node in record.ids)
    is_late = not has_started and age_s >= ABANDONED_S
    members = list(record.members)
    for node in record.ids:
        ranks = record.ranks_on(node)
        for rank, member in zip(ranks, _seen(record, node, sight, has_started, is_late), strict=True):
            if members[rank].phase not in _ENDED or member.restarts > members[rank].restarts:
                members[rank] = member
    cause = record.cause or _find_cause(record, tuple(members), sight, now_s)
    return replace(
        record, members=tuple(_explained(member, cause) for member in members), has_started=has_started, cause=cause
    )


def find_local_cause(state: TeamState, part: Part, now_s: float) -> Cause | None:
    """The failure in a part, if there is one that ends others than its group."""
    if part.team.groups:
        return None
    first, ranks = state.first_failure, part.ranks
    if first is None:
        first = next((rank for rank, member in enumerate(state.members) if member.phase is Phase.LOST), None)
    return None if first is None else Cause(ranks[first], now_s)


def _are_apart(groups: Iterable[Iterable[int]], ranks: Iterable[Iterable[int]]) -> bool:
    """Whether every group is on one node; of others a node alone cannot tell who ends with whom."""
    nodes = [set(on_node) for on_node in ranks]
    return all(any(set(group) <= on_node for on_node in nodes) for group in groups)


def _cut(team: Team, node: str, ranks: Sequence[int]) -> Team:
    members = tuple(replace(team.members[rank], node=node) for rank in ranks)
    groups = tuple(tuple(map(ranks.index, group)) for group in team.groups if group[0] in ranks)
    # The path is the server's. The node puts the archive where it likes, and fills in that.
    others = len(ranks) < len(team.members)
    return replace(team, members=members, groups=groups, others=others, archive=Path(team.archive.name))


def _others(known: Mapping[str, object], mine: str) -> tuple[str, ...]:
    return tuple(node for node in known if node != mine)


def _seen(record: TeamRecord, node: str, sight: Sight, has_started: bool, is_late: bool) -> tuple[MemberState, ...]:
    """The members of one node, in the order of their ranks."""
    ranks = record.ranks_on(node)
    name = record.places[ranks[0]].node
    if node in sight.gone:
        return _lost(ranks, f"node {name} is gone{sight.gone[node] and f' ({sight.gone[node]})'}")
    part = sight.parts.get(node)
    if part and len(part.team.members) == len(ranks):
        return tuple(_renumbered(member, ranks) for member in part.team.members)
    if node in sight.parts and has_started:
        return _lost(ranks, f"node {name} knows nothing of it any more")
    if is_late:
        return _lost(ranks, "its launcher was gone before all of the team was started")
    return tuple(record.members[rank] for rank in ranks)


def _lost(ranks: tuple[int, ...], reason: str) -> tuple[MemberState, ...]:
    return (MemberState(Phase.LOST, ExitCause.lost(reason)),) * len(ranks)


def _find_cause(record: TeamRecord, members: tuple[MemberState, ...], sight: Sight, now_s: float) -> Cause | None:
    """The first failure that anybody saw. Who fails after the team was told to end does not count."""
    told = [part.cause for part in sight.parts.values() if part and part.cause]
    if told:
        return min(told, key=lambda cause: cause.at_s)
    if record.is_told or (record.has_groups and any(member.phase not in _ENDED for member in members)):
        return None
    lost = [rank for rank, member in enumerate(members) if member.phase is Phase.LOST]
    # A member that was told to end by nobody whom we know of: its keeper was gone, and so it was killed.
    killed = [rank for rank, member in enumerate(members) if member.phase is Phase.EXITED and member.code]
    return Cause((lost or killed)[0], now_s) if lost or killed else None


def _renumbered(member: MemberState, ranks: Sequence[int]) -> MemberState:
    """A node numbers its own members; here they have their ranks in the whole team."""
    return replace(member, cause=member.cause.renumber(ranks.__getitem__)) if member.cause else member


def _explained(member: MemberState, first: Cause | None) -> MemberState:
    """A node may know no more than that it was told to end its members, or of a failure that was not the first."""
    ended = member.cause
    if first is None or ended is None or member.phase is not Phase.EXITED or ended.ended_for is EndedFor.NONE:
        return member
    return replace(member, cause=replace(ended, ended_for=EndedFor.PEER, because_of=first.rank))
