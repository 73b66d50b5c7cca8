"""The tuner measures once, caches its table in a file, ignores a corrupt one, and chooses alike on all ranks."""

import json
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from support.ranks import together
from torch._C._distributed_c10d import HashStore, PrefixStore, ProcessGroupGloo

from mimatrix.collectives import Collective, Shares
from mimatrix.comm import C10dBackend, Endpoint, Group
from mimatrix.comm.calls import SHARDED, CollectiveOp
from mimatrix.comm.memory.in_process import InProcessWindows
from mimatrix.comm.tuning.choice import AlgorithmChoice
from mimatrix.comm.tuning.tuner import SizeClass, Tuner
from mimatrix.core.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
T = TypeVar("T")
Measured = tuple[str, frozenset[str], Shares | None]
"""A size class that was measured on one rank: its name, the candidates and the shares."""
RANKS = 2


def tuned(each: Callable[[Group], T], hosts: Sequence[str] = ("here", "here")) -> list[T]:
    """Run `each(group)` on threads that are the ranks of a job with Gloo and a tuner."""
    store, shared = HashStore(), InProcessWindows()

    def rank_alone(rank: int) -> T:
        gloo = ProcessGroupGloo(PrefixStore("gloo", store), rank, RANKS, timedelta(seconds=20))
        endpoint = Endpoint.join(store, rank, RANKS, {"host": shared}, host=hosts[rank])
        try:
            return each(
                Group.create(
                    endpoint,
                    "all",
                    range(RANKS),
                    backends={"cpu": C10dBackend(gloo, rank, RANKS, 20.0)},
                    timeout_s=20.0,
                )
            )
        finally:
            endpoint.close()

    return together(RANKS, rank_alone, timeout_s=15)


def choices_of(group: Group) -> dict[str, AlgorithmChoice]:
    """Use a few sizes; return the choices that were made for them."""
    assert group.tuner
    found = {}
    for count in (10, 1000, 100_000):
        tensor = torch.ones(count)
        group.all_reduce(tensor)
        assert (tensor == RANKS).all()
        key = group.size_class(CollectiveOp(Collective.ALL_REDUCE, tensor.dtype), tensor)
        choice = group.tuner.cached_choice(key)
        assert choice
        found[str(key)] = choice
    return found


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MIMATRIX_CACHE", str(tmp_path))
    monkeypatch.setenv("MIMATRIX_ARENA", "64 MB")
    return tmp_path


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Measured]:
    """Return a list of what is measured, on all ranks."""
    measure, calls = Tuner._measure, list[Measured]()

    def counting(
        tuner: Tuner, key: SizeClass, choices: list[AlgorithmChoice], shares: Shares | None
    ) -> dict[str, float]:
        calls.append((str(key), frozenset(map(str, choices)), shares))
        return measure(tuner, key, choices, shares)

    monkeypatch.setattr(Tuner, "_measure", counting)
    return calls


def table_file(cache: Path) -> Path:
    (found,) = cache.rglob("*.json")
    return found


def read_table(file: Path) -> dict[str, dict[str, float]]:
    content = json.loads(file.read_text())
    assert content["version"] == 2
    table: dict[str, dict[str, float]] = content["table"]
    return table


def test_tuner_of_all_ranks_chooses_the_fastest_candidate(cache: Path) -> None:
    first, second = tuned(choices_of)
    assert first == second
    table = read_table(table_file(cache))
    assert table.keys() == first.keys()
    for key, times in table.items():
        assert "c10d" in times
        assert len(times) > 1
        assert times[str(first[key])] == min(times.values())


def test_tuner_of_the_next_job_measures_nothing(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (before, _), written = tuned(choices_of), table_file(cache).read_bytes()
    monkeypatch.setattr(Tuner, "_measure", lambda *_: pytest.fail("measured again"))
    assert tuned(choices_of) == [before, before]
    assert table_file(cache).read_bytes() == written


def test_tuner_measures_again_if_the_candidates_changed(cache: Path) -> None:
    tuned(choices_of)
    file = table_file(cache)
    table = {key: {"c10d": 1e-9, "a candidate of an older version": 1e-12} for key in read_table(file)}
    file.write_text(json.dumps({"version": 2, "table": table}))
    first, second = tuned(choices_of)
    assert first == second
    assert all("older" not in text for times in read_table(file).values() for text in times)


@pytest.mark.parametrize(
    "spoilt",
    [
        b"",
        b"{",
        b"\xff\xfe\x00",
        b"[1, 2]",
        b"null",
        b'{"KEY": {"c10d": 1, "windows gdraa": 2}}',
        b'{"version": 1, "table": {"KEY": {"c10d": 1, "windows gdraa": 2}}}',
        b'{"version": 2, "table": null}',
        b'{"version": 2, "table": {"KEY": 3}}',
        b'{"version": 2, "table": {"KEY": {"c10d": "soon", "windows gdraa": 1}}}',
        b'{"version": 2, "table": {"KEY": null}}',
    ],
)
def test_tuner_measures_again_if_the_cache_is_corrupt_or_old(spoilt: bytes, cache: Path) -> None:
    (before, _) = tuned(choices_of)
    file = table_file(cache)
    file.write_bytes(spoilt.replace(b"KEY", next(iter(before)).encode()))
    first, second = tuned(choices_of)
    assert first == second
    assert read_table(file).keys() == before.keys()


def test_tuner_works_without_a_writable_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = cache / "a file, not a folder"
    blocked.write_text("")
    monkeypatch.setenv("MIMATRIX_CACHE", str(blocked))
    first, second = tuned(choices_of)
    assert first == second


def test_messages_of_one_size_class_share_a_measurement(measured: list[Measured]) -> None:
    def each(group: Group) -> None:
        for count in (1024, 1500, 2047, 2047, 2048):
            group.all_reduce(torch.ones(count))

    tuned(each)
    assert sorted(name for name, *_ in measured) == sorted(
        2 * ["all_reduce of 2^12 bytes and more on cpu", "all_reduce of 2^13 bytes and more on cpu"]
    )


def test_size_classes_know_how_uneven_the_shards_are() -> None:
    def each(group: Group) -> list[str]:
        tensor = torch.ones(1024)
        weights = [(1, 1), (101, 99), (5, 3), (3, 1), (15, 1), (1, 0)]
        ops = [CollectiveOp(Collective.ALL_GATHER, tensor.dtype, shares=Shares.of(pair)) for pair in weights]
        return [str(group.size_class(op, tensor)) for op in ops]

    shards = ["", ", largest shard 1x", ", largest shard 1x", ", largest shard 1.5x", ", largest shard 2x"]
    names = [
        f"all_gather of 2^12 bytes and more on cpu{words}" for words in (*shards, ", largest shard 2x, some empty")
    ]
    assert tuned(each) == [names] * RANKS


def test_size_class_of_a_length_that_does_not_divide_is_uneven_only_if_ranks_own_shards() -> None:
    def each(group: Group) -> dict[Collective, float]:
        tensor = torch.ones(1025)
        return {
            collective: group.size_class(CollectiveOp(collective, tensor.dtype), tensor).imbalance
            for collective in Collective
        }

    for imbalance in tuned(each):
        assert {collective for collective in imbalance if imbalance[collective] > 0} == set(SHARDED)


def test_a_class_with_one_candidate_is_not_measured(measured: list[Measured]) -> None:
    def each(group: Group) -> AlgorithmChoice | None:
        tensor, shares = torch.ones(1000), Shares.of([3, 1])
        group.reduce_scatter(tensor, shares=shares)
        return group.cached_choice(CollectiveOp(Collective.REDUCE_SCATTER, tensor.dtype, shares=shares), tensor)

    assert [str(choice) for choice in tuned(each)] == ["windows gdraa"] * RANKS
    assert not measured


@pytest.mark.parametrize("collective", SHARDED)
def test_uneven_shares_are_measured_as_they_are_called_and_cached(
    collective: Collective, cache: Path, measured: list[Measured], monkeypatch: pytest.MonkeyPatch
) -> None:
    shares, timed, time_once = Shares.of([3, 1]), set[CollectiveOp](), Tuner._time

    def recording(tuner: Tuner, op: CollectiveOp, tensor: torch.Tensor, choice: AlgorithmChoice) -> float:
        timed.add(op)
        return time_once(tuner, op, tensor, choice)

    monkeypatch.setattr(Tuner, "_time", recording)

    def each(group: Group) -> None:
        for count in (1 << 18, (1 << 18) + 5):
            group.start(
                CollectiveOp(collective, torch.float32, shares=shares), torch.ones(count), may_run_here=False
            ).wait()

    tuned(each, hosts=("a", "b"))
    name = f"{collective.value} of 2^20 bytes and more on cpu, largest shard 1.5x"
    names = {"c10d padded", "send_recv gdraa", "send_recv ring", "send_recv gdraa/4"}
    assert measured == [(name, frozenset(names), shares)] * RANKS
    assert timed == {CollectiveOp(collective, torch.float32, shares=shares)}
    assert read_table(table_file(cache))[name].keys() == names
    tuned(each, hosts=("a", "b"))
    assert len(measured) == RANKS, "the next job measures nothing"


@pytest.mark.parametrize("hosts", [("a", "a"), ("a", "b")])
def test_c10d_is_no_candidate_for_a_type_that_it_does_not_reduce(hosts: tuple[str, str]) -> None:
    def each(group: Group) -> dict[Collective, set[str]]:
        return {
            collective: transports_of(group, collective, torch.ones(8, dtype=torch.int16)) for collective in Collective
        }

    for transports in tuned(each, hosts=hosts):
        for collective in (Collective.ALL_REDUCE, Collective.REDUCE_SCATTER):
            assert "c10d" not in transports[collective]
        for collective in (Collective.ALL_GATHER, Collective.BROADCAST):
            assert "c10d" in transports[collective], "it moves any type"


@pytest.mark.parametrize("hosts", [("a", "a"), ("a", "b")])
@pytest.mark.parametrize("collective", SHARDED)
def test_plain_c10d_is_no_candidate_for_a_length_that_does_not_divide(
    collective: Collective, hosts: tuple[str, str]
) -> None:
    def each(group: Group) -> list[set[str]]:
        return [candidates_of(group, CollectiveOp(collective, torch.float32), torch.ones(count)) for count in (9, 8)]

    for odd, even in tuned(each, hosts=hosts):
        assert "c10d" not in odd
        assert "c10d" in even


def candidates_of(group: Group, op: CollectiveOp, tensor: torch.Tensor) -> set[str]:
    assert group.tuner
    return set(group.tuner.candidates(group.size_class(op, tensor)))


def transports_of(group: Group, collective: Collective, tensor: torch.Tensor) -> set[str]:
    names = candidates_of(group, CollectiveOp(collective, tensor.dtype), tensor)
    return {name.split()[0] for name in names}


@pytest.mark.parametrize("transport", ["windows", "c10d"])
def test_a_transport_can_be_requested(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIMATRIX_TRANSPORT", transport)
    for choices in tuned(choices_of):
        assert {choice.transport for choice in choices.values()} == {transport}


def test_a_transport_and_algorithm_can_be_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIMATRIX_TRANSPORT", "windows ring")
    for choices in tuned(choices_of):
        assert {str(choice) for choice in choices.values()} == {"windows ring"}


def test_a_requested_transport_that_is_not_available_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIMATRIX_TRANSPORT", "send_recv ring")
    for choices in tuned(choices_of):
        assert {choice.transport for choice in choices.values()} <= {"windows", "c10d"}


def test_an_unknown_transport_is_refused_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MIMATRIX_TRANSPORT", "pigeons")

    def refused(each: Callable[[Group], None]) -> str:
        with pytest.raises(UserError) as caught:
            tuned(each)
        return str(caught.value)

    assert (
        refused(lambda _: None)
        == 'MIMATRIX_TRANSPORT is "pigeons"; use windows, mixed, send_recv, c10d, or leave it out'
    )
