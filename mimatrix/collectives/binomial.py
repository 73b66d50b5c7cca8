"""Binomial tree: the sum climbs to the root in log2 P rounds and comes down in as many. For small messages."""

from mimatrix.collectives.compose import stagger
from mimatrix.collectives.schedule import Collective, Move, Round, Schedule
from mimatrix.collectives.shares import Shares


def binomial(collective: Collective, ranks: int, *, segments: int = 1, root: int = 0) -> Schedule:
    """Build the all-reduce (up, then down) or the broadcast (down), pipelined if there are several segments."""
    pieces = []
    for segment in range(segments):
        block = range(segment, segment + 1)
        up = _climb(ranks, root, block) if collective is Collective.ALL_REDUCE else []
        pieces.append(up + _descend(ranks, root, block))
    owners = (root,) * segments
    return Schedule("binomial", collective, ranks, owners, Shares.equal(segments), tuple(stagger(pieces)), root)


def _climb(ranks: int, root: int, block: range) -> list[Round]:
    """Build the rounds up: in round s, ranks whose number from the root ends in s+1 zero bits add their child."""
    return [
        tuple(Move((low + half + root) % ranks, (low + root) % ranks, block, adds=True) for low in lows)
        for half, lows in _levels(ranks)
    ]


def _descend(ranks: int, root: int, block: range) -> list[Round]:
    return [
        tuple(Move((low + root) % ranks, (low + half + root) % ranks, block, adds=False) for low in lows)
        for half, lows in reversed(_levels(ranks))
    ]


def _levels(ranks: int) -> list[tuple[int, range]]:
    """Return for each distance 2^s the lower ends of the edges of that length."""
    halves = [1 << step for step in range((ranks - 1).bit_length())]
    return [(half, range(0, ranks - half, 2 * half)) for half in halves]
