"""GDRAA in two levels: right for any hosts, and each block crosses between two hosts once in each direction."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mimatrix.collectives import Collective, Schedule, Shares, verify
from mimatrix.collectives.compose import group_by_owner
from mimatrix.collectives.two_level import two_level

HALVES = (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
Hosts = tuple[tuple[int, ...], ...]


def hosts_of(layout: str) -> Hosts:
    """Return the ranks of each host; `aab` has ranks 0 and 1 on one host and rank 2 on another."""
    return tuple(tuple(rank for rank, name in enumerate(layout) if name == host) for host in dict.fromkeys(layout))


def bytes_between(schedule: Schedule, layout: str) -> dict[str, float]:
    """Return the part of the message that leaves each host."""
    ends = schedule.shares.ends()
    left = dict.fromkeys(layout, 0.0)
    for move in (move for moves in schedule.rounds for move in moves):
        if layout[move.src] != layout[move.dst]:
            left[layout[move.src]] += float(ends[move.blocks.stop] - ends[move.blocks.start])
    return left


@settings(max_examples=150, deadline=None)
@given(
    layout=st.lists(st.sampled_from("abcd"), min_size=2, max_size=10).map("".join).filter(lambda s: len(set(s)) > 1),
    collective=st.sampled_from((Collective.ALL_REDUCE, *HALVES)),
    segments=st.integers(1, 6),
    data=st.data(),
)
def test_two_level_is_right_for_any_hosts_shares_and_segments(
    layout: str, collective: Collective, segments: int, data: st.DataObject
) -> None:
    weights = st.lists(st.integers(0, 5), min_size=len(layout), max_size=len(layout)).filter(any)
    shares = data.draw(st.none() | weights.map(Shares.of))
    schedule = two_level(collective, hosts_of(layout), shares=shares, segments=segments)
    verify(schedule)
    if collective in HALVES and segments > 1:
        counts = (shares or Shares.equal(len(layout))).cut(1000)
        verify(group_by_owner(schedule, counts))


@pytest.mark.parametrize("layout", ["ab", "aabb", "abab", "abbb", "aabbcc", "abbccc"])
def test_each_host_sends_as_much_as_a_ring_of_hosts_would(layout: str) -> None:
    hosts = len(set(layout))
    schedule = two_level(Collective.ALL_REDUCE, hosts_of(layout))
    assert bytes_between(schedule, layout) == pytest.approx(dict.fromkeys(layout, 2 * (hosts - 1) / hosts))


def test_work_is_spread_over_the_ranks_of_a_host() -> None:
    sent = two_level(Collective.ALL_REDUCE, hosts_of("aaabbb")).sent()
    assert sent.max() == pytest.approx(sent.min())


@pytest.mark.parametrize(("segments", "rounds"), [(1, 4), (4, 7), (16, 19)])
def test_rounds_grow_by_one_for_each_segment(segments: int, rounds: int) -> None:
    assert len(two_level(Collective.ALL_REDUCE, hosts_of("aabb"), segments=segments).rounds) == rounds
