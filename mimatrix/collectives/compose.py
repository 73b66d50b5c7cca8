"""Building schedules from smaller ones: merging rounds, translating ranks and blocks, staggering segments."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from mimatrix.collectives.schedule import Move, Round, Schedule
from mimatrix.collectives.shares import Shares


def side_by_side(parts: Iterable[Sequence[Round]]) -> list[Round]:
    """Run several lists of rounds at the same time: round k of all of them together, in their order."""
    return stagger(list(parts), shift=0)


def stagger(segments: Sequence[Sequence[Round]], shift: int = 1) -> list[Round]:
    """Pipeline segments: segment s starts `shift` rounds after segment s-1, older segments first within a round."""
    ends = [shift * index + len(rounds) for index, rounds in enumerate(segments)]
    merged: list[list[Move]] = [[] for _ in range(max(ends, default=0))]
    for index, rounds in enumerate(segments):
        for number, moves in enumerate(rounds, start=shift * index):
            merged[number] += moves
    return [tuple(moves) for moves in merged]


def translate(rounds: Sequence[Round], ranks: Sequence[int], first_block: int, blocks_each: int = 1) -> list[Round]:
    """Repeat the moves among other ranks, every block standing for `blocks_each` blocks from `first_block` on."""
    return [tuple(_translate_move(move, ranks, first_block, blocks_each) for move in moves) for moves in rounds]


def relabel(schedule: Schedule, ranks: Sequence[int]) -> Schedule:
    """Return the schedule with rank i called `ranks[i]`: from an algorithm's placement to the job's rank numbers."""
    rounds = tuple(translate(schedule.rounds, ranks, 0))
    owners = tuple(ranks[owner] for owner in schedule.owners)
    return replace(schedule, rounds=rounds, owners=owners, root=ranks[schedule.root])


def group_by_owner(schedule: Schedule, counts: Sequence[int]) -> Schedule:
    """Return the schedule with the blocks of each owner side by side, in the order of ranks; rank r owns `counts[r]`.

    So a rank's part is one range even if it travels in several segments. Every move must be of one block.
    """
    order = sorted(range(schedule.blocks), key=lambda block: schedule.owners[block])
    place = {block: number for number, block in enumerate(order)}
    owners = tuple(schedule.owners[block] for block in order)
    sizes = [size for rank, count in enumerate(counts) for size in _cut_evenly(count, owners.count(rank))]
    rounds = tuple(tuple(_renumber_block(move, place) for move in moves) for moves in schedule.rounds)
    return replace(schedule, owners=owners, shares=Shares.of(sizes), rounds=rounds)


def _cut_evenly(count: int, parts: int) -> list[int]:
    return [count // parts + (number < count % parts) for number in range(parts)]


def _renumber_block(move: Move, place: dict[int, int]) -> Move:
    assert len(move.blocks) == 1, "blocks of one move would not stay side by side"
    first = place[move.blocks.start]
    return replace(move, blocks=range(first, first + 1))


def _translate_move(move: Move, ranks: Sequence[int], first: int, width: int) -> Move:
    blocks = range(first + move.blocks.start * width, first + move.blocks.stop * width)
    return Move(ranks[move.src], ranks[move.dst], blocks, move.adds)
