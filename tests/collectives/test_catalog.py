"""Every algorithm of the catalog: it verifies for every number of ranks, and costs what the catalog says."""

import random

import pytest

from mimatrix.collectives import CATALOG, AlgorithmRequest, Collective, Shares, build, even_groups, verify
from mimatrix.core.errors import UserError

COUNTS = [*range(2, 65), 100]
CASES = [(entry.name, collective) for entry in CATALOG.values() for collective in entry.collectives]


def random_shares(ranks: int, seed: int) -> Shares:
    """Uneven weights; about a quarter of the ranks own nothing, rank 0 always something."""
    dice = random.Random(seed)
    return Shares.of([1.0, *(dice.choice([0.0, 1.0, 1.0, 1.0]) * dice.random() for _ in range(ranks - 1))])


def admitted(name: str, collective: Collective, ranks: int, **options: object) -> AlgorithmRequest:
    """Return a request that the algorithm takes; hierarchical halves get groups of one size, which they require."""
    groups = None
    if name == "hierarchical" and collective is not Collective.ALL_REDUCE:
        sizes = [size for size in range(2, ranks) if ranks % size == 0]
        groups = even_groups(ranks, sizes[len(sizes) // 2] if sizes else ranks)
    return AlgorithmRequest(collective, ranks, groups=groups, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "collective"), CASES)
def test_verifies_for_every_count(name: str, collective: Collective) -> None:
    for ranks in COUNTS:
        verify(build(name, admitted(name, collective, ranks)))


@pytest.mark.parametrize(("name", "collective"), [case for case in CASES if "shares" in CATALOG[case[0]].options])
def test_verifies_with_random_shares(name: str, collective: Collective) -> None:
    for ranks in COUNTS:
        schedule = build(name, admitted(name, collective, ranks, shares=random_shares(ranks, seed=ranks)))
        verify(schedule)
        assert len(set(schedule.shares.fractions)) > 1 or schedule.blocks <= 2


@pytest.mark.parametrize("segments", [2, 3, 8])
@pytest.mark.parametrize(
    ("name", "collective"), [(name, collective) for name, collective in CASES if "segments" in CATALOG[name].options]
)
def test_verifies_in_segments(name: str, collective: Collective, segments: int) -> None:
    for ranks in (2, 3, 5, 8, 13, 24):
        verify(build(name, admitted(name, collective, ranks, segments=segments)))


@pytest.mark.parametrize(("name", "collective"), [case for case in CASES if "root" in CATALOG[case[0]].options])
def test_verifies_from_every_root(name: str, collective: Collective) -> None:
    for ranks in (2, 5, 8):
        for root in range(ranks):
            verify(build(name, AlgorithmRequest(collective, ranks, root=root)))


@pytest.mark.parametrize("inside", ["gdraa", "ring", "halving_doubling"])
@pytest.mark.parametrize(
    "between", ["gdraa", "ring", "halving_doubling", "binomial", "double_tree", "sharded_parameter_server"]
)
def test_hierarchical_takes_any_parts(inside: str, between: str) -> None:
    for ranks, size in ((8, 4), (12, 3), (10, 4), (18, 8), (7, 2), (9, 8), (6, 6), (5, 1)):
        for segments in (1, 3):
            groups = even_groups(ranks, size)
            wanted = AlgorithmRequest(
                Collective.ALL_REDUCE, ranks, groups=groups, inside=inside, between=between, segments=segments
            )
            verify(build("hierarchical", wanted))


@pytest.mark.parametrize("name", [name for name, entry in CATALOG.items() if entry.rounds])
def test_costs_what_the_catalog_says(name: str) -> None:
    entry = CATALOG[name]
    assert entry.rounds
    assert entry.sends
    assert entry.roundings
    for ranks in COUNTS:
        schedule = build(name, AlgorithmRequest(Collective.ALL_REDUCE, ranks))
        assert len(schedule.rounds) == entry.rounds(ranks)
        assert schedule.roundings() == entry.roundings(ranks)
        busiest = schedule.sent().max()
        # In trees the closed form bounds; elsewhere it is exact.
        assert busiest <= entry.sends(ranks) + 1e-9
        if name not in ("double_tree", "binomial"):
            assert busiest == pytest.approx(entry.sends(ranks), rel=1e-9)


@pytest.mark.parametrize(("name", "collective"), CASES)
def test_moves_are_bounded_before_they_are_built(name: str, collective: Collective) -> None:
    for ranks in (2, 3, 8, 13, 30, 64):
        request = admitted(name, collective, ranks)
        moves = sum(map(len, build(name, request).rounds))
        assert moves <= CATALOG[name].moves(request) <= 40 * moves


def test_gdraa_has_two_rounds_and_one_more_for_each_segment() -> None:
    for ranks in (2, 3, 17, 64, 200):
        assert len(build("gdraa", AlgorithmRequest(Collective.ALL_REDUCE, ranks)).rounds) == 2
    for segments in (1, 2, 16):
        assert len(build("gdraa", AlgorithmRequest(Collective.ALL_REDUCE, 6, segments=segments)).rounds) == segments + 1


def test_gdraa_starts_at_the_successor_so_that_nobody_is_crowded() -> None:
    schedule = build("gdraa", AlgorithmRequest(Collective.ALL_REDUCE, 9))
    for number in range(2):
        queues = schedule.moves_of(number)
        for place in range(8):
            assert sorted(queues[rank][place].src for rank in range(9)) == list(range(9))


def test_the_slow_owner_of_nothing_sends_and_receives_the_message_once() -> None:
    """A rank with share f sends S(1 + f(P-2)) in all: the formula that shares by bandwidth rest on."""
    weights = (0.5, 0.3, 0.2, 0.0)
    schedule = build("gdraa", AlgorithmRequest(Collective.ALL_REDUCE, 4, shares=Shares.of(weights), segments=4))
    for rank, share in enumerate(weights):
        assert schedule.sent()[rank] == pytest.approx(1 + share * 2, rel=1e-12)


@pytest.mark.parametrize(
    ("name", "request_", "sentence"),
    [
        ("gdra", AlgorithmRequest(Collective.ALL_REDUCE, 4), 'unknown algorithm "gdra"; did you mean "gdraa"?'),
        ("gdraa", AlgorithmRequest(Collective.ALL_REDUCE, 1), "needs two ranks or more, got 1"),
        (
            "double_tree",
            AlgorithmRequest(Collective.BROADCAST, 4),
            "double_tree has no broadcast; use gdraa or ring or binomial",
        ),
        ("ring", AlgorithmRequest(Collective.ALL_REDUCE, 4, shares=Shares.equal(3)), "got 3 shares for 4 ranks"),
        ("gdraa", AlgorithmRequest(Collective.ALL_REDUCE, 4, segments=0), "got 0 segments; use 1 or more"),
        ("ring", AlgorithmRequest(Collective.ALL_REDUCE, 100_000), "more than the 10,000,000 that a schedule may have"),
        (
            "halving_doubling",
            AlgorithmRequest(Collective.ALL_REDUCE, 6, fold=False),
            'needs a power of two of ranks, got 6; use algorithm = "ring", or fold = true',
        ),
        (
            "hierarchical",
            AlgorithmRequest(Collective.ALL_REDUCE, 8, inside="hdrm"),
            "hdrm cannot be a part of hierarchical",
        ),
        ("sharded_parameter_server", AlgorithmRequest(Collective.ALL_REDUCE, 4, servers=9), "9 servers among 4 ranks"),
    ],
)
def test_refuses_with_one_sentence(name: str, request_: AlgorithmRequest, sentence: str) -> None:
    with pytest.raises(UserError, match=r"^[^\n]+$") as caught:
        build(name, request_)
    assert sentence in str(caught.value)
