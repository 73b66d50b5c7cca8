"""Hierarchical: reduce inside groups, all-reduce between groups (one rail for each place in a group), gather inside.

Any algorithm inside, any between. In segments, the fabric inside the groups works on one segment while the fabric
between them works on another. Groups may be of unequal size: members beyond the smallest group's size pass their data
to the rails first and read the result from them last.
"""

from collections.abc import Callable, Sequence

from mimatrix.collectives.compose import side_by_side, stagger, translate
from mimatrix.collectives.schedule import Collective, Move, Round, Schedule
from mimatrix.collectives.shares import Shares
from mimatrix.core.errors import UnsuitedError

Build = Callable[[Collective, int], Schedule]
Groups = Sequence[Sequence[int]]


def hierarchical(
    collective: Collective,
    groups: Groups,
    inside: Build,
    between: Build,
    *,
    segments: int = 1,
    shares: Shares | None = None,
) -> Schedule:
    """Compose the phases. Reduce-scatter and all-gather need groups of one size, since every rank owns a block."""
    sizes = {len(group) for group in groups}
    if collective is not Collective.ALL_REDUCE and len(sizes) > 1:
        raise UnsuitedError(
            f"hierarchical {collective} needs groups of one size, got {sorted(sizes)}; use gdraa or ring"
        )
    nest = _Nest(groups, inside, between, collective)
    pieces = [nest.phases(segment) for segment in range(segments)]
    shift = max(len(phase) for phase in pieces[0])
    rounds = stagger([[moves for phase in phases for moves in phase] for phases in pieces], max(1, shift))
    ranks = sum(map(len, groups))
    owners = nest.owners * segments
    block_shares = (shares or Shares.equal(ranks)).for_blocks(owners)
    return Schedule("hierarchical", collective, ranks, owners, block_shares, tuple(rounds))


class _Nest:
    """The blocks of one segment: each inner block (a rail) has those that the algorithm between the groups needs."""

    def __init__(self, groups: Groups, inside: Build, between: Build, collective: Collective) -> None:
        self.groups = groups
        self.rails = min(map(len, groups))
        self.reduce = _build(inside, Collective.REDUCE_SCATTER, self.rails)
        self.gather = _build(inside, Collective.ALL_GATHER, self.rails)
        assert self.reduce.owners == self.gather.owners
        self.across = _build(between, collective, len(groups))
        self.collective = collective
        self.owners = tuple(groups[group][rail] for rail in self.reduce.owners for group in self.across.owners)

    def phases(self, segment: int) -> list[list[Round]]:
        """Return the rounds of one segment: those inside, those between, those inside again."""
        first = segment * len(self.owners)
        reduce, across, gather = self._inside(self.reduce, first), self._across(first), self._inside(self.gather, first)
        match self.collective:
            case Collective.REDUCE_SCATTER:
                return [reduce, across]
            case Collective.ALL_GATHER:
                return [across, gather]
            case _:
                folded = [self._fold_in(first)], [self._fold_out(first)]
                return [phase for phase in (folded[0], reduce, across, gather, folded[1]) if phase and phase != [()]]

    def _inside(self, schedule: Schedule, first: int) -> list[Round]:
        return side_by_side(translate(schedule.rounds, group, first, self.across.blocks) for group in self.groups)

    def _across(self, first: int) -> list[Round]:
        rails = []
        for place, rail in enumerate(self.reduce.owners):
            members = [group[rail] for group in self.groups]
            rails.append(translate(self.across.rounds, members, first + place * self.across.blocks))
        return side_by_side(rails)

    def _fold_in(self, first: int) -> Round:
        """Build the round in which every rail adds its chunk of the members that are not rails."""
        return tuple(
            Move(extra, group[rail], chunk, adds=True)
            for group in self.groups
            for rail, chunk in self._chunks(first)
            for extra in group[self.rails :]
        )

    def _fold_out(self, first: int) -> Round:
        return tuple(
            Move(group[rail], extra, chunk, adds=False)
            for group in self.groups
            for extra in group[self.rails :]
            for rail, chunk in self._chunks(first)
        )

    def _chunks(self, first: int) -> list[tuple[int, range]]:
        width = self.across.blocks
        starts = range(first, first + len(self.owners), width)
        return [(rail, range(at, at + width)) for rail, at in zip(self.reduce.owners, starts, strict=True)]


def _build(build: Build, collective: Collective, count: int) -> Schedule:
    """Build the part for `count` ranks; a single rank needs no rounds."""
    if count == 1:
        return Schedule("alone", collective, 1, (0,), Shares.equal(1), ())
    return build(collective, count)
