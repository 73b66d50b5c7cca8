"""A schedule compiled for one rank and one message length: which elements to read from which peers in which round."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

import numpy as np

from mimatrix.collectives.schedule import Move, Schedule

_MAX_PROGRAMS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """Elements [start, stop), either added up from several peers or copied from one."""

    sources: tuple[int, ...]
    start: int
    stop: int
    adds: bool
    completes: bool
    """Whether the sum is complete with this read."""


@dataclass(frozen=True, slots=True)
class Serve:
    """Elements [start, stop) that `peer` reads from this rank; `adds` as in its `Read`."""

    peer: int
    start: int
    stop: int
    adds: bool


@dataclass(frozen=True, slots=True)
class ProgramStep:
    """One round of one rank: for which peers to wait, then what to read."""

    waits: tuple[int, ...]
    reads: tuple[Read, ...]
    serves: tuple[Serve, ...]
    """What peers read from this rank, for each of them in its own order: what messages have to carry."""


@dataclass(frozen=True)
class Program:
    """The rounds of one rank. `readers` are the peers that read from it, each with the last round in which it does."""

    steps: tuple[ProgramStep, ...]
    readers: tuple[tuple[int, int], ...]
    bounds: tuple[int, ...]
    """Where each block starts, and the end."""

    @cached_property
    def direct(self) -> tuple[Serve, ...] | None:
        """What peers read of this rank's data before it is reduced, if the program can run directly; otherwise None.

        It can if every sum is complete after one read and no copied data are passed on, as in GDRAA. Then only those
        data and the sums have to be where peers read, and results may go anywhere.
        """
        summed: list[Read] = []
        copied: list[Read] = []
        initial: list[Serve] = []
        for step in self.steps:
            for serve in step.serves:
                if _overlaps_any(serve, copied):
                    return None
                if not _overlaps_any(serve, summed):
                    initial.append(serve)
            for read in step.reads:
                if read.adds and not read.completes:
                    return None
                (summed if read.adds else copied).append(read)
        return tuple(initial)


def _overlaps_any(serve: Serve, reads: Sequence[Read]) -> bool:
    return any(read.start < serve.stop and serve.start < read.stop for read in reads)


class Compiler:
    """Compiles one schedule for one rank, and caches the programs by message length."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self.schedule, self.rank = schedule, rank
        self._completing = completing_writes(schedule)
        self._programs: dict[int, Program] = {}

    def program(self, count: int) -> Program:
        """Return the program for a message of `count` elements."""
        if count not in self._programs:
            if len(self._programs) > _MAX_PROGRAMS:
                self._programs.clear()
            self._programs[count] = self._compile(count)
        return self._programs[count]

    def _compile(self, count: int) -> Program:
        bounds = np.concatenate(([0], np.cumsum(self.schedule.shares.cut(count))))
        ends = tuple(int(end) for end in bounds)
        steps = tuple(self._step(number, moves, ends) for number, moves in enumerate(self.schedule.rounds))
        last_read: dict[int, int] = {}
        for number, moves in enumerate(self.schedule.rounds):
            last_read |= {move.dst: number for move in moves if move.src == self.rank}
        return Program(steps, tuple(last_read.items()), ends)

    def _step(self, number: int, moves: tuple[Move, ...], ends: tuple[int, ...]) -> ProgramStep:
        reads = {rank: self._reads(number, rank, moves, ends) for rank in self._readers(moves)}
        waits = tuple(dict.fromkeys(move.src for move in moves if move.dst == self.rank))
        serves = tuple(
            Serve(rank, read.start, read.stop, read.adds)
            for rank, theirs in reads.items()
            for read in theirs
            if rank != self.rank and self.rank in read.sources
        )
        return ProgramStep(waits, reads.get(self.rank, ()), serves)

    def _readers(self, moves: tuple[Move, ...]) -> list[int]:
        """Return the ranks that read from this one in a round, and itself if it reads, in the schedule's order."""
        return list(dict.fromkeys(move.dst for move in moves if self.rank in (move.src, move.dst)))

    def _reads(self, number: int, rank: int, moves: tuple[Move, ...], ends: tuple[int, ...]) -> tuple[Read, ...]:
        return tuple(self._iter_reads(number, rank, [move for move in moves if move.dst == rank], ends))

    def _iter_reads(self, number: int, rank: int, moves: list[Move], ends: tuple[int, ...]) -> Iterator[Read]:
        """Yield the reads of one rank: additions to a block in one read, so that they are rounded once."""
        for move in moves:
            start, stop = ends[move.blocks.start], ends[move.blocks.stop]
            if not move.adds and start < stop:
                yield Read(sources=(move.src,), start=start, stop=stop, adds=False, completes=False)
        sources: dict[int, list[int]] = defaultdict(list)
        for move in moves:
            for block in move.blocks if move.adds else ():
                sources[block].append(move.src)

        def key(pair: tuple[int, int]) -> tuple[int, tuple[int, ...], bool]:
            """Group neighbouring blocks with the same sources."""
            index, block = pair
            return block - index, tuple(sources[block]), (number, rank, block) in self._completing

        for (_, peers, completes), neighbours in groupby(enumerate(sorted(sources)), key):
            blocks = [block for _, block in neighbours]
            start, stop = ends[blocks[0]], ends[blocks[-1] + 1]
            if start < stop:
                yield Read(sources=peers, start=start, stop=stop, adds=True, completes=completes)


def completing_writes(schedule: Schedule) -> frozenset[tuple[int, int, int]]:
    """Return (round, rank, block) of the additions after which a block holds every rank's contribution."""
    everyone = (1 << schedule.ranks) - 1
    held = [[1 << rank] * schedule.blocks for rank in range(schedule.ranks)]
    writes: set[tuple[int, int, int]] = set()
    for number, moves in enumerate(schedule.rounds):
        for move in moves:
            for block in move.blocks:
                before = held[move.dst][block]
                held[move.dst][block] = held[move.src][block] | (before if move.adds else 0)
                if move.adds and held[move.dst][block] == everyone != before:
                    writes.add((number, move.dst, block))
    return frozenset(writes)
