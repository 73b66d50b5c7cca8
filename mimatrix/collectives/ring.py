"""Ring: every rank reads from its predecessor only; 2(P-1) rounds of one block each. Any order of the ranks."""

from collections.abc import Sequence
from itertools import pairwise

from mimatrix.collectives.compose import stagger
from mimatrix.collectives.schedule import Collective, Move, Round, Schedule
from mimatrix.collectives.shares import Shares


def ring(
    collective: Collective,
    ranks: int,
    *,
    shares: Shares | None = None,
    segments: int = 1,
    order: Sequence[int] | None = None,
    root: int = 0,
) -> Schedule:
    """Build the ring in the given order of ranks, segments following one another by rounds. Broadcast is a chain."""
    circle = list(order or range(ranks))
    assert sorted(circle) == list(range(ranks)), "the order must name every rank once"
    if collective is Collective.BROADCAST:
        return _chain(circle, segments, root)
    pieces = [_segment(collective, circle, segment * ranks) for segment in range(segments)]
    owners = tuple(range(ranks)) * segments
    sizes = (shares or Shares.equal(ranks)).for_blocks(owners)
    return Schedule("ring", collective, ranks, owners, sizes, tuple(stagger(pieces)), root)


def _segment(collective: Collective, circle: Sequence[int], first: int) -> list[Round]:
    rounds: list[Round] = []
    if collective is not Collective.ALL_GATHER:
        # The block of the owner at place o starts at its successor and comes home in the last round.
        rounds += [_turn(circle, step + 2, first, adds=True) for step in range(len(circle) - 1)]
    if collective is not Collective.REDUCE_SCATTER:
        rounds += [_turn(circle, step + 1, first, adds=False) for step in range(len(circle) - 1)]
    return rounds


def _turn(circle: Sequence[int], back: int, first: int, *, adds: bool) -> Round:
    """Build the round in which each rank reads from its predecessor the block whose owner is `back` places away."""
    return tuple(
        Move(circle[place - 1], rank, _block(first + circle[(place - back) % len(circle)]), adds)
        for place, rank in enumerate(circle)
    )


def _chain(circle: Sequence[int], segments: int, root: int) -> Schedule:
    start = circle.index(root)
    chain = [*circle[start:], *circle[:start]]
    pairs = list(pairwise(chain))
    pieces = [[(Move(a, b, _block(segment), adds=False),) for a, b in pairs] for segment in range(segments)]
    owners = (root,) * segments
    rounds = tuple(stagger(pieces))
    return Schedule("ring", Collective.BROADCAST, len(circle), owners, Shares.equal(segments), rounds, root)


def _block(number: int) -> range:
    return range(number, number + 1)
