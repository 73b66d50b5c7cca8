"""Verification of schedules: they do what their collective promises, and ranks never race.

Contents: every contribution is counted on its way, so a doubled gradient is caught as well as a lost one.
Order: each rank's knowledge of the others' progress is a vector clock that grows by the wait rule (see `schedule`).
A block that a peer reads in round j may be written by its holder in round k >= j only if the holder then knows that the
peer has finished round j. Within one round that can never be known, so such a pair is always a race.
"""

from collections import Counter, defaultdict

import numpy as np
from numpy.typing import NDArray

from mimatrix.collectives.schedule import Collective, Schedule
from mimatrix.core.errors import ScheduleError

Counts = NDArray[np.int64]

_EXACT_CELLS = 1 << 26
"""Above this many (rank, block, contributor) cells contributions are not counted one by one but fingerprinted."""


def verify(schedule: Schedule) -> None:
    """Raise `ScheduleError` with the rank and the block unless the schedule is right and race-free."""
    _check_shape(schedule)
    _check_order(schedule)
    _check_contents(schedule)


def _check_shape(schedule: Schedule) -> None:
    if len(schedule.shares) != schedule.blocks:
        raise ScheduleError(f"{schedule.algorithm}: {len(schedule.shares)} shares for {schedule.blocks} blocks")
    if not all(0 <= rank < schedule.ranks for rank in (*schedule.owners, schedule.root)):
        raise ScheduleError(f"{schedule.algorithm}: an owner or the root is none of the {schedule.ranks} ranks")
    for number, moves in enumerate(schedule.rounds):
        for move in moves:
            inside = 0 <= move.src < schedule.ranks and 0 <= move.dst < schedule.ranks and move.src != move.dst
            blocks = move.blocks
            if not inside or not (0 <= blocks.start < blocks.stop <= schedule.blocks and blocks.step == 1):
                raise ScheduleError(
                    f"{schedule.algorithm}: round {number} has {move}, which is not between two of the "
                    f"{schedule.ranks} ranks over some of the {schedule.blocks} blocks"
                )


def _check_order(schedule: Schedule) -> None:
    # done[r, d]: the last round that rank r knows rank d to have finished.
    done = np.full((schedule.ranks, schedule.ranks), -1, dtype=np.int64)
    unread: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for number, moves in enumerate(schedule.rounds):
        _refuse_mixed_writes(schedule, number)
        entering = _knowledge_on_entry(schedule, number, done)
        for move in moves:
            for block in move.blocks:
                unread[move.src, block].append((move.dst, number))
        for move in moves:
            for block in move.blocks:
                for reader, when in unread.pop((move.dst, block), ()):
                    if entering[move.dst, reader] < when:
                        raise ScheduleError(_race(schedule, move.dst, block, number, reader, when))
        done = entering
        np.fill_diagonal(done, number)


def _refuse_mixed_writes(schedule: Schedule, number: int) -> None:
    """Refuse a replacement next to another write of the block in one round; additions may land in any order."""
    for rank, moves in schedule.moves_of(number).items():
        writes = Counter(block for move in moves for block in move.blocks)
        doubled = [block for move in moves if not move.adds for block in move.blocks if writes[block] > 1]
        if doubled:
            raise ScheduleError(
                f"{schedule.algorithm}: rank {rank} replaces block {doubled[0]} in round {number} and writes it again"
            )


def _knowledge_on_entry(schedule: Schedule, number: int, done: Counts) -> Counts:
    """Return what each rank knows once it has waited for the peers that it reads from in this round."""
    entering = done.copy()
    for rank, moves in schedule.moves_of(number).items():
        peers = list({move.src for move in moves})
        entering[rank] = np.maximum(done[rank], done[peers].max(axis=0))
    return entering


def _race(schedule: Schedule, holder: int, block: int, number: int, reader: int, when: int) -> str:
    return (
        f"{schedule.algorithm}: rank {holder} writes block {block} in round {number} without knowing that rank "
        f"{reader} has read it in round {when}"
    )


def _check_contents(schedule: Schedule) -> None:
    given = _contributions(schedule)
    held = _held_at_start(schedule, given)
    for moves in schedule.rounds:
        # In place is as good as from a snapshot: no block is both read and written in a round, as was checked.
        for move in moves:
            cut = slice(move.blocks.start, move.blocks.stop)
            if move.adds:
                held[move.dst, cut] += held[move.src, cut]
            else:
                held[move.dst, cut] = held[move.src, cut]
    expected = _expected_at_end(schedule, given)
    ranks, blocks = np.arange(schedule.ranks)[:, None], np.arange(schedule.blocks)[None, :]
    if schedule.collective is Collective.REDUCE_SCATTER:
        ranks, blocks = np.array(schedule.owners), np.arange(schedule.blocks)
    wrong = (held[ranks, blocks] != expected[blocks]).any(axis=-1)
    if wrong.any():
        place = tuple(np.argwhere(wrong)[0])
        rank = int(np.broadcast_to(ranks, wrong.shape)[place])
        block = int(np.broadcast_to(blocks, wrong.shape)[place])
        raise ScheduleError(_disagreement(schedule, rank, block, held[rank, block]))


def _contributions(schedule: Schedule) -> Counts:
    """Return a row for each rank that stands for its data: unit vectors, which count exactly, or fingerprints."""
    exact = schedule.ranks * schedule.ranks * schedule.blocks <= _EXACT_CELLS
    prints = np.random.default_rng(20180207).integers(1 << 20, 1 << 40, (schedule.ranks, 2))
    rows: Counts = np.eye(schedule.ranks, dtype=np.int64) if exact else prints
    # The last column counts garbage, of which no rank's data have any: adding to it must not pass for replacing it.
    return np.column_stack([rows, np.zeros(schedule.ranks, dtype=np.int64)])


def _held_at_start(schedule: Schedule, given: Counts) -> Counts:
    """Return held[rank, block] before the first round; garbage if a rank has no valid data yet."""
    held = np.zeros((schedule.ranks, schedule.blocks, given.shape[1]), dtype=np.int64)
    held[:, :, -1] = 1
    match schedule.collective:
        case Collective.ALL_REDUCE | Collective.REDUCE_SCATTER:
            held[:] = given[:, None, :]
        case Collective.ALL_GATHER:
            owners = np.array(schedule.owners)
            held[owners, np.arange(schedule.blocks)] = given[owners]
        case Collective.BROADCAST:
            held[schedule.root] = given[schedule.root]
    return held


def _expected_at_end(schedule: Schedule, given: Counts) -> Counts:
    """Return expected[block], the same for every rank that must have it."""
    match schedule.collective:
        case Collective.ALL_REDUCE | Collective.REDUCE_SCATTER:
            return np.tile(given.sum(axis=0), (schedule.blocks, 1))
        case Collective.ALL_GATHER:
            rows: Counts = given[np.array(schedule.owners)]
            return rows
        case Collective.BROADCAST:
            return np.tile(given[schedule.root], (schedule.blocks, 1))


def _disagreement(schedule: Schedule, rank: int, block: int, counts: Counts) -> str:
    expected = {
        Collective.ALL_GATHER: f"the block of its owner, rank {schedule.owners[block]}",
        Collective.BROADCAST: f"the block of the root, rank {schedule.root}",
    }.get(schedule.collective, f"one of each of {schedule.ranks} ranks")
    what = "something else"
    if len(counts) == schedule.ranks + 1:
        what = str({int(peer): int(counts[peer]) for peer in np.flatnonzero(counts[:-1])})
    if counts[-1]:
        what += " and what was in memory before"
    return f"{schedule.algorithm}: rank {rank} ends with block {block} = {what}, expected {expected}"
