"""A collective as a value: rounds of moves that peers pull from one another's memory.

One value has many readers: `verify` proves it, `netsim.replay` prices it, the executors run it. All of them follow one
**wait rule**: a rank enters round k when it has finished its own moves of round k-1 and so has every peer that it reads
from in round k. There is no global barrier. The number of rounds is the number of synchronisations.
"""

from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from mimatrix.collectives.shares import Shares


class Collective(StrEnum):
    """The operation, which decides what must hold at the end; see `verify`."""

    ALL_REDUCE = "all_reduce"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_GATHER = "all_gather"
    BROADCAST = "broadcast"


@dataclass(frozen=True, slots=True)
class Move:
    """`dst` reads `blocks` (a contiguous range) of `src`; `adds` sums them into its own, otherwise they replace it."""

    src: int
    dst: int
    blocks: range
    adds: bool


Round = tuple[Move, ...]
"""Moves of one round, in order: a reader pulls its own moves in the order in which they stand here."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """The rounds of a collective. `owners[b]` is the rank that owns block b; `shares` has the size of each block."""

    algorithm: str
    collective: Collective
    ranks: int
    owners: tuple[int, ...]
    shares: Shares
    rounds: tuple[Round, ...]
    root: int = 0

    @property
    def blocks(self) -> int:
        """Number of blocks that the message is cut into."""
        return len(self.owners)

    def moves_of(self, number: int) -> dict[int, list[Move]]:
        """Return the moves of one round by the rank that reads them, each list in its order."""
        by_reader: dict[int, list[Move]] = defaultdict(list)
        for move in self.rounds[number]:
            by_reader[move.dst].append(move)
        return by_reader

    def sent(self) -> NDArray[np.float64]:
        """Return for each rank the part of the message that others read from it, all rounds together."""
        ends = self.shares.ends()
        sent = np.zeros(self.ranks)
        for moves in self.rounds:
            for move in moves:
                sent[move.src] += ends[move.blocks.stop] - ends[move.blocks.start]
        return sent

    def roundings(self) -> int:
        """Return how often an element is rounded on its way, at most.

        Sums within a round are kept in higher precision and rounded once, when the round ends.
        """
        depth = np.zeros((self.ranks, self.blocks), dtype=np.int64)
        for moves in self.rounds:
            after = depth.copy()
            for move in moves:
                cut = slice(move.blocks.start, move.blocks.stop)
                read = depth[move.src, cut]
                summed = np.maximum(after[move.dst, cut], np.maximum(depth[move.dst, cut], read) + 1)
                after[move.dst, cut] = summed if move.adds else read
            depth = after
        return int(depth.max(initial=0))
