"""Halving-doubling: partners at distances 1, 2, 4, ... exchange halves, quarters, ...; then the mirror image.

Blocks are numbered bit-reversed, so that what a rank holds after every step is one contiguous range. Ranks beyond the
largest power of two are folded: each adds its data onto a partner first and reads the result from it last.
"""

from collections.abc import Sequence

from mimatrix.collectives.schedule import Collective, Move, Round, Schedule
from mimatrix.collectives.shares import Shares
from mimatrix.core.errors import UnsuitedError


def largest_power_of_two(count: int) -> int:
    """Return the largest power of two that is not above `count`."""
    return 1 << (count.bit_length() - 1)


def halving_doubling(
    collective: Collective, ranks: int, *, shares: Shares | None = None, fold: bool = True, core: int = 0
) -> Schedule:
    """Build an all-reduce, reduce-scatter or all-gather among `core` ranks, rank e >= core folded onto e mod core."""
    core = core or largest_power_of_two(ranks)
    if core != ranks and not fold:
        raise UnsuitedError(
            f'halving_doubling needs a power of two of ranks, got {ranks}; use algorithm = "ring", or fold = true'
        )
    layout = _Layout(ranks, core)
    rounds: list[Round] = []
    if collective is Collective.ALL_REDUCE:
        rounds = [layout.fold_in(), *layout.halve(), *layout.double(), layout.fold_out()]
    elif collective is Collective.REDUCE_SCATTER:
        rounds = [layout.fold_in(), *layout.halve(), layout.hand_out()]
    elif collective is Collective.ALL_GATHER:
        rounds = [layout.hand_in(), *layout.double(), layout.fold_out(but_own=True)]
    sizes = (shares or _default_shares(collective, ranks, core)).for_blocks(layout.owners)
    return Schedule(
        "halving_doubling", collective, ranks, layout.owners, sizes, tuple(moves for moves in rounds if moves)
    )


def _default_shares(collective: Collective, ranks: int, core: int) -> Shares:
    """Return equal shares; in an all-reduce the folded ranks own nothing, because no rank needs them to."""
    folded_weight = 0.0 if collective is Collective.ALL_REDUCE else 1.0
    return Shares.of([1.0] * core + [folded_weight] * (ranks - core))


class _Layout:
    """Where the blocks lie: core ranks in bit-reversed order, each followed by the blocks of those folded onto it."""

    def __init__(self, ranks: int, core: int) -> None:
        self.ranks, self.core = ranks, core
        self.steps = core.bit_length() - 1
        self._place = [_reversed_bits(rank, self.steps) for rank in range(core)]
        owners: list[int] = []
        self._edge = [0]
        for place in range(core):
            owners += range(_reversed_bits(place, self.steps), ranks, core)
            self._edge.append(len(owners))
        self.owners = tuple(owners)

    def halve(self) -> list[Round]:
        """Build the reduce-scatter: in step s every rank keeps the half of its blocks named by bit s of its number."""
        return [
            tuple(Move(rank ^ (1 << step), rank, self._held(rank, step + 1), adds=True) for rank in range(self.core))
            for step in range(self.steps)
        ]

    def double(self) -> list[Round]:
        """Build the all-gather, the mirror image: each rank reads what its partner holds."""
        rounds = []
        for step in reversed(range(self.steps)):
            pairs = [(rank, rank ^ (1 << step)) for rank in range(self.core)]
            rounds.append(tuple(Move(peer, rank, self._held(peer, step + 1), adds=False) for rank, peer in pairs))
        return rounds

    def fold_in(self) -> Round:
        """Build the round in which partners add all that the folded ranks hold."""
        return tuple(Move(rank, rank % self.core, range(self.ranks), adds=True) for rank in self._folded_ranks())

    def fold_out(self, *, but_own: bool = False) -> Round:
        """Build the round in which folded ranks read the result from their partners."""
        moves: list[Move] = []
        for rank in self._folded_ranks():
            own = self.owners.index(rank)
            ranges = [range(own), range(own + 1, self.ranks)] if but_own else [range(self.ranks)]
            moves += [Move(rank % self.core, rank, blocks, adds=False) for blocks in ranges if blocks]
        return tuple(moves)

    def hand_out(self) -> Round:
        """Build the round in which folded ranks read just the block that they own."""
        return tuple(Move(rank % self.core, rank, self._own(rank), adds=False) for rank in self._folded_ranks())

    def hand_in(self) -> Round:
        """Build the round in which partners read the blocks that folded ranks own."""
        return tuple(Move(rank, rank % self.core, self._own(rank), adds=False) for rank in self._folded_ranks())

    def _held(self, rank: int, steps: int) -> range:
        """Return the blocks that `rank` is left with after `steps` halvings."""
        width = self.core >> steps
        low = self._place[rank] // width * width
        return range(self._edge[low], self._edge[low + width])

    def _own(self, rank: int) -> range:
        place = self.owners.index(rank)
        return range(place, place + 1)

    def _folded_ranks(self) -> Sequence[int]:
        return range(self.core, self.ranks)


def _reversed_bits(number: int, width: int) -> int:
    return int(format(number, f"0{width}b")[::-1], 2) if width else 0
