"""Double binary tree: two trees carry half of the message each, and inner ranks of one are leaves of the other.

So every rank's link is used fully, while the depth stays logarithmic. In segments, pipelined.
"""

from collections import defaultdict

from mimatrix.collectives.compose import side_by_side, stagger
from mimatrix.collectives.schedule import Collective, Move, Round, Schedule
from mimatrix.collectives.shares import Shares


def double_tree(collective: Collective, ranks: int, *, segments: int = 1) -> Schedule:
    """Build the all-reduce over two complementary in-order trees."""
    assert collective is Collective.ALL_REDUCE
    trees = [_parents(ranks), _mirror(ranks)]
    pieces = []
    for segment in range(segments):
        halves = [_up_and_down(tree, range(b, b + 1)) for b, tree in enumerate(trees, start=2 * segment)]
        pieces.append(side_by_side(halves))
    owners = tuple(_root(tree) for tree in trees) * segments
    return Schedule(
        "double_tree", collective, ranks, owners, Shares.equal(2 * segments), tuple(stagger(pieces)), owners[0]
    )


def _parents(ranks: int) -> dict[int, int]:
    """Return the parent of every rank but the root, in the in-order tree over 1..P in which odd numbers are leaves."""
    parents: dict[int, int] = {}
    for place in range(1, ranks + 1):
        low = place & -place
        above = (place ^ low) | (low << 1)
        if above > ranks:
            above = place ^ low
        if above:
            parents[place - 1] = above - 1
    return parents


def _mirror(ranks: int) -> dict[int, int]:
    """Return the second tree. Seen from the other end (for odd P shifted by one) leaves and inner ranks swap."""
    places = [ranks - 1 - rank if ranks % 2 == 0 else (rank + 1) % ranks for rank in range(ranks)]
    return {places[child]: places[parent] for child, parent in _parents(ranks).items()}


def _root(parents: dict[int, int]) -> int:
    return next(parent for parent in parents.values() if parent not in parents)


def _up_and_down(parents: dict[int, int], block: range) -> list[Round]:
    """Build the rounds up, in which parents add their complete children, and down, in which children read."""
    children: dict[int, list[int]] = defaultdict(list)
    for child, parent in sorted(parents.items()):
        children[parent].append(child)

    def height(rank: int) -> int:
        return max((height(child) + 1 for child in children.get(rank, ())), default=0)

    root = _root(parents)
    up: list[list[Move]] = [[] for _ in range(height(root))]
    for parent, below in sorted(children.items()):
        up[height(parent) - 1] += [Move(child, parent, block, adds=True) for child in below]
    down: list[list[Move]] = []
    level = [root]
    while any(rank in children for rank in level):
        edges = [(rank, child) for rank in level for child in children.get(rank, ())]
        down.append([Move(parent, child, block, adds=False) for parent, child in edges])
        level = [child for _, child in edges]
    return [tuple(moves) for moves in up + down]
