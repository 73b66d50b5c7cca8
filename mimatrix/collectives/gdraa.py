"""GDRAA, as reconstructed: every rank owns a block; two rounds for any number of ranks.

Round one: each owner reads its block from every peer and adds it up. Round two: each rank reads every other block from
its owner. Both in the rotated order r+1, r+2, ..., so that no two ranks start at the same peer. With k segments one is
gathered while the next is reduced: k+1 rounds. (The paper does not print the algorithm; see docs/decisions.)
"""

from collections.abc import Sequence

from mimatrix.collectives.compose import stagger
from mimatrix.collectives.schedule import Collective, Move, Round, Schedule
from mimatrix.collectives.shares import Shares


def gdraa(
    collective: Collective, ranks: int, *, shares: Shares | None = None, segments: int = 1, root: int = 0
) -> Schedule:
    """Build the direct exchange among owners: all-reduce in two rounds, its halves and the broadcast likewise."""
    pieces = [_segment(collective, ranks, root, segment * ranks) for segment in range(segments)]
    owners = tuple(range(ranks)) * segments
    sizes = (shares or Shares.equal(ranks)).for_blocks(owners)
    return Schedule("gdraa", collective, ranks, owners, sizes, tuple(stagger(pieces)), root)


def _segment(collective: Collective, ranks: int, root: int, first: int) -> list[Round]:
    every_rank = range(ranks)
    match collective:
        case Collective.ALL_REDUCE:
            return [reduce_to_owners(ranks, every_rank, first), gather_from_owners(ranks, every_rank, first)]
        case Collective.REDUCE_SCATTER:
            return [reduce_to_owners(ranks, every_rank, first)]
        case Collective.ALL_GATHER:
            return [gather_from_owners(ranks, every_rank, first)]
        case Collective.BROADCAST:
            gather = gather_from_owners(ranks, every_rank, first)
            return [_scatter(ranks, root, first), tuple(move for move in gather if move.dst != root)]


def reduce_to_owners(ranks: int, owners: Sequence[int], first: int) -> Round:
    """Build the round in which owner i reads block `first + i` from each other rank, its successor first, and adds."""
    return tuple(
        Move((owner + step) % ranks, owner, blocks, adds=True)
        for owner, blocks in _owned_blocks(owners, first)
        for step in range(1, ranks)
    )


def gather_from_owners(ranks: int, owners: Sequence[int], first: int) -> Round:
    """Build the round in which every rank reads block `first + i` from owner i, the first owner after itself first."""
    held = sorted(_owned_blocks(owners, first), key=lambda pair: pair[0])
    numbers = [owner for owner, _ in held]
    moves: list[Move] = []
    start = 0
    for rank in range(ranks):
        while start < len(numbers) and numbers[start] <= rank:
            start += 1
        turned = held[start:] + held[:start]
        moves += [Move(owner, rank, blocks, adds=False) for owner, blocks in turned if owner != rank]
    return tuple(moves)


def _owned_blocks(owners: Sequence[int], first: int) -> list[tuple[int, range]]:
    return [(owner, range(first + index, first + index + 1)) for index, owner in enumerate(owners)]


def _scatter(ranks: int, root: int, first: int) -> Round:
    """Build the round in which every rank but the root reads its own block from the root."""
    return tuple(
        Move(root, rank, blocks, adds=False) for rank, blocks in _owned_blocks(range(ranks), first) if rank != root
    )
