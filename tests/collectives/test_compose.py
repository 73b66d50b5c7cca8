"""Schedules built from others: the blocks of each rank side by side."""

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimatrix.collectives import AlgorithmRequest, Collective, Move, Schedule, Shares, build, verify
from mimatrix.collectives.compose import group_by_owner

HALVES = (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
COUNTS = st.lists(st.integers(0, 1000), min_size=2, max_size=7).filter(any)
"""How many elements each rank owns; some none."""


def in_segments(name: str, collective: Collective, counts: list[int], segments: int) -> Schedule:
    return build(name, AlgorithmRequest(collective, len(counts), shares=Shares.of(counts), segments=segments))


@settings(max_examples=200, deadline=None)
@given(
    name=st.sampled_from(["gdraa", "ring"]),
    collective=st.sampled_from(HALVES),
    counts=COUNTS,
    segments=st.integers(1, 5),
)
def test_grouped_by_owner_keeps_the_collective_and_puts_each_ranks_blocks_side_by_side(
    name: str, collective: Collective, counts: list[int], segments: int
) -> None:
    plain = in_segments(name, collective, counts, segments)
    grouped = group_by_owner(plain, counts)
    verify(grouped)
    assert grouped.owners == tuple(rank for rank in range(len(counts)) for _ in range(segments))
    ends = [0, *accumulate(grouped.shares.cut(sum(counts)))]
    assert ends[::segments] == [0, *accumulate(counts)], "a rank's blocks are what it owns, to the element"
    for rank in range(len(counts)):
        blocks = grouped.shares.cut(sum(counts))[rank * segments : (rank + 1) * segments]
        assert max(blocks) - min(blocks) <= 1, "segments are equal but for what does not divide evenly"


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from(["gdraa", "ring"]),
    collective=st.sampled_from(HALVES),
    counts=COUNTS,
    segments=st.integers(1, 5),
)
def test_grouped_by_owner_moves_the_same_blocks_in_the_same_rounds(
    name: str, collective: Collective, counts: list[int], segments: int
) -> None:
    plain = in_segments(name, collective, counts, segments)
    grouped = group_by_owner(plain, counts)
    assert [[_without_place(plain, move) for move in moves] for moves in plain.rounds] == [
        [_without_place(grouped, move) for move in moves] for moves in grouped.rounds
    ]


def _without_place(schedule: Schedule, move: Move) -> tuple[int, int, bool, int, int]:
    """Describe a move by whose block it is, and which of that rank's, instead of by where the block lies."""
    (block,) = move.blocks
    owner = schedule.owners[block]
    return move.src, move.dst, move.adds, owner, schedule.owners[:block].count(owner)


def test_grouped_by_owner_refuses_moves_of_several_blocks() -> None:
    schedule = build("halving_doubling", AlgorithmRequest(Collective.REDUCE_SCATTER, 4))
    with pytest.raises(AssertionError, match="would not stay side by side"):
        group_by_owner(schedule, [1, 2, 3, 4])
