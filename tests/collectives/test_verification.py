"""`verify` must object to every sabotage, and to races that a lucky timing would hide."""

from dataclasses import replace
from typing import Any

import pytest

from mimatrix.collectives import (
    CATALOG,
    AlgorithmRequest,
    Collective,
    Move,
    Schedule,
    Shares,
    build,
    even_groups,
    verify,
)
from mimatrix.core.errors import ScheduleError

CASES = [(entry.name, collective) for entry in CATALOG.values() for collective in entry.collectives]


def built(name: str, collective: Collective) -> Schedule:
    segments = 2 if "segments" in CATALOG[name].options else 1
    return build(name, AlgorithmRequest(collective, 8, segments=segments, groups=even_groups(8, 4)))


def with_round(schedule: Schedule, number: int, moves: tuple[Move, ...]) -> Schedule:
    rounds = (*schedule.rounds[:number], moves, *schedule.rounds[number + 1 :])
    return replace(schedule, rounds=rounds)


@pytest.mark.parametrize(("name", "collective"), CASES)
def test_objects_to_any_lost_move(name: str, collective: Collective) -> None:
    schedule = built(name, collective)
    verify(schedule)
    for number, moves in enumerate(schedule.rounds):
        for index in range(len(moves)):
            with pytest.raises(ScheduleError):
                verify(with_round(schedule, number, moves[:index] + moves[index + 1 :]))


@pytest.mark.parametrize(("name", "collective"), CASES)
def test_objects_to_any_doubled_addition(name: str, collective: Collective) -> None:
    schedule = built(name, collective)
    for number, moves in enumerate(schedule.rounds):
        for index, move in enumerate(moves):
            if move.adds:
                with pytest.raises(ScheduleError):
                    verify(with_round(schedule, number, (*moves[: index + 1], *moves[index:])))


@pytest.mark.parametrize(("name", "collective"), CASES)
def test_objects_to_adding_what_should_replace_and_the_reverse(name: str, collective: Collective) -> None:
    """A gather that adds would be right only in memory that happens to be zero."""
    schedule = built(name, collective)
    for number, moves in enumerate(schedule.rounds):
        for index, move in enumerate(moves):
            turned = replace(move, adds=not move.adds)
            with pytest.raises(ScheduleError):
                verify(with_round(schedule, number, (*moves[:index], turned, *moves[index + 1 :])))


@pytest.mark.parametrize("wrong", [{"owners": (0, 1, 2, 9)}, {"owners": (0, -1, 2, 3)}, {"root": 4}, {"root": -1}])
def test_objects_to_owners_that_are_no_ranks(wrong: dict[str, Any]) -> None:
    with pytest.raises(ScheduleError, match="an owner or the root is none of the 4 ranks"):
        verify(replace(build("gdraa", AlgorithmRequest(Collective.ALL_REDUCE, 4)), **wrong))


def test_objects_to_replacing_beside_another_write() -> None:
    """Which of the two lands last is up to chance, even where the sum would come out right."""
    block = range(1)
    both = (Move(1, 0, block, adds=False), Move(2, 0, block, adds=True))
    with pytest.raises(ScheduleError, match="rank 0 replaces block 0 in round 0 and writes it again"):
        verify(one_block((both,)))


def test_names_rank_block_and_contributions() -> None:
    schedule = build("ring", AlgorithmRequest(Collective.ALL_REDUCE, 4))
    doubled = with_round(schedule, 0, schedule.rounds[0] + schedule.rounds[0][:1])
    with pytest.raises(
        ScheduleError, match=r"ring: rank \d ends with block \d = \{.*2.*\}, expected one of each of 4 ranks"
    ):
        verify(doubled)


def one_block(rounds: tuple[tuple[Move, ...], ...], ranks: int = 3, blocks: int = 1) -> Schedule:
    return Schedule("sketch", Collective.ALL_REDUCE, ranks, (0,) * blocks, Shares.equal(blocks), rounds)


def test_objects_to_reading_what_is_written_in_the_same_round() -> None:
    """Rank 0 sums the block while rank 1 reads it: right by luck, if rank 1 comes late."""
    block = range(1)
    exchange = (Move(1, 0, block, adds=True), Move(0, 1, block, adds=True))
    with pytest.raises(
        ScheduleError, match=r"writes block 0 in round 0 without knowing that rank . has read it in round 0"
    ):
        verify(one_block((exchange,), ranks=2))


def test_objects_to_overwriting_what_a_slow_peer_may_still_read() -> None:
    """In round 1 rank 0 takes a new value from rank 1 and never waits for rank 2, which reads rank 0 in round 0."""
    block = range(1)
    gather = (Move(0, 2, block, adds=True),)
    overwrite = (Move(1, 0, block, adds=True),)
    with pytest.raises(ScheduleError, match="rank 0 writes block 0 in round 1 without knowing that rank 2 has read"):
        verify(one_block((gather, overwrite)))


def test_knowledge_travels_through_third_ranks() -> None:
    """Rank 0 may write in round 2: it waited for rank 1, that for rank 2, and that had read rank 0 in round 0."""
    first, second, third = range(1), range(1, 2), range(2, 3)
    rounds = (
        (Move(0, 2, first, adds=True),),
        (Move(2, 1, second, adds=False),),
        (Move(1, 0, first, adds=False),),
    )
    schedule = Schedule("relay", Collective.ALL_REDUCE, 3, (0, 1, 2), Shares.equal(3), rounds)
    with pytest.raises(ScheduleError, match="ends with block"):
        verify(schedule)  # no race: only the contents are incomplete
    unaware = replace(schedule, rounds=(rounds[0], (Move(0, 1, third, adds=False),), rounds[2]))
    with pytest.raises(ScheduleError, match="without knowing that rank 2"):
        verify(unaware)


@pytest.mark.parametrize(
    "move",
    [
        Move(0, 0, range(1), adds=True),
        Move(3, 0, range(1), adds=True),
        Move(0, -1, range(1), adds=True),
        Move(0, 1, range(0), adds=True),
        Move(0, 1, range(2), adds=True),
        Move(0, 1, range(0, 1, 2), adds=True),
    ],
)
def test_objects_to_moves_that_cannot_be(move: Move) -> None:
    with pytest.raises(ScheduleError, match="which is not between two of the 3 ranks"):
        verify(one_block(((move,),)))


def test_objects_to_shares_that_do_not_fit_the_blocks() -> None:
    schedule = replace(build("gdraa", AlgorithmRequest(Collective.ALL_REDUCE, 4)), shares=Shares.equal(3))
    with pytest.raises(ScheduleError, match="3 shares for 4 blocks"):
        verify(schedule)


def test_fingerprints_catch_what_counting_catches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large schedules are fingerprinted instead of counted: the same sabotage must be seen."""
    monkeypatch.setattr("mimatrix.collectives.verification._EXACT_CELLS", 0)
    for name in ("gdraa", "halving_doubling", "hierarchical", "double_tree"):
        schedule = built(name, Collective.ALL_REDUCE)
        verify(schedule)
        moves = schedule.rounds[-1]
        with pytest.raises(ScheduleError, match="something else"):
            verify(with_round(schedule, len(schedule.rounds) - 1, moves[1:]))


@pytest.mark.long
def test_large_schedules_verify() -> None:
    verify(build("halving_doubling", AlgorithmRequest(Collective.ALL_REDUCE, 1000)))
