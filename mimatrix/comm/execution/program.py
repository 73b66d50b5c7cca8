"""A schedule compiled for one rank and one message: which elements to take from whom, in which round."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np

from mimatrix.collectives.schedule import Move, Schedule


@dataclass(frozen=True, slots=True)
class Read:
    """Elements [start, stop): summed from several peers, or copied from one. `completes`: nobody adds to them later."""

    sources: tuple[int, ...]
    start: int
    stop: int
    adds: bool
    completes: bool


@dataclass(frozen=True, slots=True)
class Serve:
    """Elements [start, stop) that `peer` takes from this rank; `adds` as in its take."""

    peer: int
    start: int
    stop: int
    adds: bool


@dataclass(frozen=True, slots=True)
class ProgramStep:
    """One round of one rank: whom to wait for, then what to take."""

    waits: tuple[int, ...]
    takes: tuple[Read, ...]
    gives: tuple[Serve, ...]
    """What peers take from this rank, for each of them in its own order: what messages must carry."""


@dataclass(frozen=True)
class Program:
    """What one rank does. `readers` are the peers that read from it, each with the last round in which it does."""

    steps: tuple[ProgramStep, ...]
    readers: tuple[tuple[int, int], ...]
    bounds: tuple[int, ...]
    """Where each block starts, and the end."""

    @cached_property
    def direct(self) -> tuple[Serve, ...] | None:
        """What of this rank's data peers read before it is summed, if the program can run directly; None if not.

        It can where every sum is completed at once and nothing that was copied is passed on, as in GDRAA: then only
        those data and the sums have to lie where peers read, and results may go anywhere.
        """
        summed: list[Read] = []
        copied: list[Read] = []
        first: list[Serve] = []
        for step in self.steps:
            for give in step.gives:
                if _meets(give, copied):
                    return None
                if not _meets(give, summed):
                    first.append(give)
            for take in step.takes:
                if take.adds and not take.completes:
                    return None
                (summed if take.adds else copied).append(take)
        return tuple(first)


def _meets(give: Serve, takes: Sequence[Read]) -> bool:
    return any(take.start < give.stop and give.start < take.stop for take in takes)


class Compiler:
    """Compiles one schedule for one rank; programs are kept by message length."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.schedule, self.rank = schedule, rank
        self._completing = completing_writes(schedule)
        self._programs: dict[int, Program] = {}

    def program(self, count: int) -> Program:
        """The program for a message of `count` elements."""
        if count not in self._programs:
            if len(self._programs) > 256:
                self._programs.clear()
            self._programs[count] = self._compiled(count)
        return self._programs[count]

    def _compiled(self, count: int) -> Program:
        bounds = np.concatenate(([0], np.cumsum(self.schedule.shares.cut(count))))
        ends = tuple(int(end) for end in bounds)
        steps = tuple(self._step(number, moves, ends) for number, moves in enumerate(self.schedule.rounds))
        last: dict[int, int] = {}
        for number, moves in enumerate(self.schedule.rounds):
            last |= {move.dst: number for move in moves if move.src == self.rank}
        return Program(steps, tuple(last.items()), ends)

    def _step(self, number: int, moves: tuple[Move, ...], ends: tuple[int, ...]) -> ProgramStep:
        takes = {rank: self._takes(number, rank, moves, ends) for rank in self._ranks_near(moves)}
        waits = tuple(dict.fromkeys(move.src for move in moves if move.dst == self.rank))
        gives = tuple(
            Serve(rank, take.start, take.stop, take.adds)
            for rank, theirs in takes.items()
            for take in theirs
            if rank != self.rank and self.rank in take.sources
        )
        return ProgramStep(waits, takes.get(self.rank, ()), gives)

    def _ranks_near(self, moves: tuple[Move, ...]) -> list[int]:
        """Those that read from this rank in a round, and itself, in the order of the schedule."""
        return list(dict.fromkeys(move.dst for move in moves if self.rank in (move.src, move.dst)))

    def _takes(self, number: int, rank: int, moves: tuple[Move, ...], ends: tuple[int, ...]) -> tuple[Read, ...]:
        return tuple(self._each_take(number, rank, [move for move in moves if move.dst == rank], ends))

    def _each_take(self, number: int, rank: int, mine: list[Move], ends: tuple[int, ...]) -> Iterator[Read]:
        """Additions to one block come together, so that they are rounded once; like neighbours are one take."""
        for move in mine:
            start, stop = ends[move.blocks.start], ends[move.blocks.stop]
            if not move.adds and start < stop:
                yield Read((move.src,), start, stop, adds=False, completes=False)
        sources: dict[int, list[int]] = defaultdict(list)
        for move in mine:
            for block in move.blocks if move.adds else ():
                sources[block].append(move.src)

        def alike(pair: tuple[int, int]) -> tuple[int, tuple[int, ...], bool]:
            place, block = pair
            return block - place, tuple(sources[block]), (number, rank, block) in self._completing

        for (_, peers, completes), run in groupby(enumerate(sorted(sources)), alike):
            blocks = [block for _, block in run]
            start, stop = ends[blocks[0]], ends[blocks[-1] + 1]
            if start < stop:
                yield Read(peers, start, stop, adds=True, completes=completes)


def completing_writes(schedule: Schedule) -> frozenset[tuple[int, int, int]]:
    """(round, rank, block) of the additions after which a block holds every rank's contribution."""
    everyone = (1 << schedule.ranks) - 1
    held = [[1 << rank] * schedule.blocks for rank in range(schedule.ranks)]
    found: set[tuple[int, int, int]] = set()
    for number, moves in enumerate(schedule.rounds):
        for move in moves:
            for block in move.blocks:
                before = held[move.dst][block]
                held[move.dst][block] = held[move.src][block] | (before if move.adds else 0)
                if move.adds and held[move.dst][block] == everyone != before:
                    found.add((number, move.dst, block))
    return frozenset(found)
