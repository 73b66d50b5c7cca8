"""The tuner measures once, caches its table in a file, ignores a corrupt one, and chooses alike on all ranks."""

import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import pytest
import torch
from support.ranks import together
from torch._C._distributed_c10d import HashStore, PrefixStore, ProcessGroupGloo

from mimatrix.collectives import Collective
from mimatrix.comm import C10dBackend, Endpoint, Group
from mimatrix.comm.memory.in_process import InProcessWindows
from mimatrix.comm.tuning.choice import AlgorithmChoice
from mimatrix.comm.tuning.tuner import SizeClass, Tuner
from mimatrix.core.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
T = TypeVar("T")
RANKS = 2


def tuned(each: Callable[[Group], T]) -> list[T]:
    """Run `each(group)` on threads that are the ranks of a job with Gloo and a tuner."""
    store, shared = HashStore(), InProcessWindows()

    def rank_alone(rank: int) -> T:
        gloo = ProcessGroupGloo(PrefixStore("gloo", store), rank, RANKS, timedelta(seconds=20))
        endpoint = Endpoint.join(store, rank, RANKS, {"host": shared}, host="here")
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
        key = group.size_class(Collective.ALL_REDUCE, tensor)
        choice = group.tuner.cached_choice(key)
        assert choice
        found[str(key)] = choice
    return found


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MIMATRIX_CACHE", str(tmp_path))
    monkeypatch.setenv("MIMATRIX_ARENA", "64 MB")
    return tmp_path


def table_file(cache: Path) -> Path:
    (found,) = cache.rglob("*.json")
    return found


def read_table(file: Path) -> dict[str, dict[str, float]]:
    content = json.loads(file.read_text())
    assert content["version"] == 1
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
    file.write_text(json.dumps({"version": 1, "table": table}))
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
        b'{"version": 0, "table": {"KEY": {"c10d": 1, "windows gdraa": 2}}}',
        b'{"version": 1, "table": null}',
        b'{"version": 1, "table": {"KEY": 3}}',
        b'{"version": 1, "table": {"KEY": {"c10d": "soon", "windows gdraa": 1}}}',
        b'{"version": 1, "table": {"KEY": null}}',
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


def test_messages_of_one_size_class_share_a_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    measured = Tuner._measure

    def counting(tuner: Tuner, key: SizeClass, choices: list[AlgorithmChoice]) -> dict[str, float]:
        asked.append(str(key))
        return measured(tuner, key, choices)

    monkeypatch.setattr(Tuner, "_measure", counting)

    def each(group: Group) -> None:
        for count in (1024, 1500, 2047, 2047, 2048):
            group.all_reduce(torch.ones(count))

    tuned(each)
    assert sorted(asked) == sorted(
        2 * ["all_reduce of 2^12 bytes and more on cpu", "all_reduce of 2^13 bytes and more on cpu"]
    )


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

    assert refused(lambda _: None) == 'MIMATRIX_TRANSPORT is "pigeons"; use windows, send_recv, c10d, or leave it out'
