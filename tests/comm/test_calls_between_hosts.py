"""Ranks of several hosts, as real processes between which Gloo carries: differences are told, at no round trip a call.

What scripts/hosts.py says of itself must hold.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.ranks import in_groups

from mimatrix.comm import AlgorithmChoice, Group
from mimatrix.comm.control.unfinished_calls import begun_name
from mimatrix.comm.tuning.choice import C10D
from mimatrix.core.errors import MismatchError

SCRIPTS = Path(__file__).parent / "scripts"


PARTS = (
    ("other_length", "other_length_later", "other_op_known"),
    ("alike_then_late", "killed_in_pairs", "left_in_pairs"),
)
"""Scenarios that run at the same time: a late rank sleeps most of its time."""


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what was said in every scenario of hosts.py."""
    cache = {"MIMATRIX_CACHE": str(tmp_path_factory.mktemp("hosts")), "OMP_NUM_THREADS": "1"}
    scripts = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "hosts.py", *scenarios],
            cwd=SCRIPTS,
            env=os.environ | cache,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for scenarios in PARTS
    ]
    printed = [script.communicate(timeout=100) for script in scripts]
    assert [script.returncode for script in scripts] == [0, 0], printed
    return [json.loads(line) for stdout, _ in printed for line in stdout.splitlines() if line.startswith("{")]


def of_ranks(outcomes: list[dict[str, Any]], scenario: str) -> list[dict[str, Any]]:
    told = [each for each in outcomes if each["scenario"] == scenario and "rank" in each]
    assert sorted(each["rank"] for each in told) == [0, 1, 2], outcomes
    return told


@pytest.mark.parametrize(
    ("scenario", "number", "own", "other"),
    [
        ("other_length", 1, "all_reduce of 1000 float32 (sum", "all_reduce of 10 float32 (sum"),
        pytest.param(
            "other_length_later",
            21,
            "all_reduce of 1000 float32 (sum",
            "all_reduce of 10 float32 (sum",
            marks=pytest.mark.long,
        ),
        pytest.param(
            "other_op_known",
            21,
            "all_reduce of 10 float32 (max",
            "all_reduce of 10 float32 (sum",
            marks=pytest.mark.long,
        ),
    ],
)
def test_different_calls_are_raised_on_all_hosts_naming_both(
    scenario: str, number: int, own: str, other: str, outcomes: list[dict[str, Any]]
) -> None:
    for each in of_ranks(outcomes, scenario):
        assert each["error"] == "MismatchError"
        assert f"ranks disagree at call number {number}: rank" in each["text"]
        assert "rank 1 on host-1" in each["text"]
        assert "rank 0 on host-0" in each["text"] or "rank 2 on host-2" in each["text"]
        assert own in each["text"]
        assert other in each["text"]
        assert each["took_s"] < 5


@pytest.mark.long
def test_late_rank_that_makes_the_right_call_is_not_blamed(outcomes: list[dict[str, Any]]) -> None:
    late = {each["rank"]: each for each in of_ranks(outcomes, "late")}
    assert {each["error"] for each in late.values()} == {"NoneType"}, late
    assert late[0]["took_s"] > 2.5, "it waited"


@pytest.mark.long
def test_no_round_trip_to_the_coordinator_precedes_a_native_call(outcomes: list[dict[str, Any]]) -> None:
    for each in of_ranks(outcomes, "alike"):
        assert each["error"] == "NoneType"
        assert each["counters"] == {"all_reduce gloo": 201}
        assert each["sent"] < 40, "of 200 calls"


def test_rank_killed_while_hosts_mix_windows_and_messages_is_named_by_all(outcomes: list[dict[str, Any]]) -> None:
    told = {each["rank"]: each for each in outcomes if each["scenario"] == "killed_in_pairs" and "rank" in each}
    assert sorted(told) == [0, 1, 3], outcomes
    for each in told.values():
        assert each["error"] == "PeerLost", each
        assert "rank 2 on host-1 was lost in all_reduce of 1048576 float32" in each["text"]
        assert each["took_s"] < 10
        assert set(each["counters"]) == {"all_reduce mixed gloo"}


def test_rank_that_left_is_named_by_those_who_wait_for_it_indirectly(outcomes: list[dict[str, Any]]) -> None:
    told = {each["rank"]: each for each in outcomes if each["scenario"] == "left_in_pairs" and "rank" in each}
    assert sorted(told) == [0, 1, 2], outcomes
    assert all("rank 3 on host-1 was lost" in each["text"] for each in told.values()), told


@pytest.mark.long
def test_no_rank_hangs_after_different_calls(outcomes: list[dict[str, Any]]) -> None:
    ended = {each["scenario"]: each["ended"] for each in outcomes if "ended" in each}
    assert ended.pop("killed_in_pairs") == [0, 0, -9, 0]
    assert ended.pop("left_in_pairs") == [0, 0, 0, 0]
    assert sum(map(len, ended.values())) == 12
    assert all(-9 not in codes for codes in ended.values())


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_fault_that_is_known_is_raised_by_the_next_native_call_however_quick() -> None:
    def on_rank(group: Group) -> None:
        control = group.endpoint.control
        group.all_reduce(torch.ones(4), choice=C10D)
        if group.rank == 0:
            with pytest.raises(MismatchError):
                control.report_mismatch("ranks disagree", [0, 1])
        until = time.monotonic() + 5
        while not control.has_news:
            assert time.monotonic() < until
            time.sleep(0.005)
        with pytest.raises(MismatchError, match="ranks disagree"):
            group.all_reduce(torch.ones(4), choice=C10D)

    in_groups(2, on_rank, hosts=["a", "b"], kinds=dict, with_gloo=True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("transport", "logged"), [("windows", 0), ("c10d", 5)])
def test_ranks_number_their_calls_alike_however_fast_they_are(
    transport: str, logged: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a size is measured, a fast rank does not know yet that windows will carry it, and a slow one does."""
    monkeypatch.setenv("MIMATRIX_CACHE", str(tmp_path))
    monkeypatch.setenv("MIMATRIX_TRANSPORT", transport)

    def on_rank(group: Group) -> int:
        works = []
        for size in (100, 100, 1 << 16, 1 << 16, 100):
            works.append(group.all_reduce(torch.ones(size), wait=False))
            if group.rank == 1:
                works[-1].wait()
        for work in works:
            work.wait()
        return group.endpoint.control.begun.get(begun_name("all"), 0)

    assert in_groups(2, on_rank, with_gloo=True, tune=True) == [logged, logged]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("choice", [AlgorithmChoice("send_recv", "gdraa"), AlgorithmChoice("mixed", "two_level")])
def test_messages_of_the_user_do_not_meet_those_of_collectives(choice: AlgorithmChoice) -> None:
    def on_rank(group: Group) -> float:
        gloo, message, total = group.backends["cpu"].backend, torch.tensor([42.0]), torch.tensor([float(group.rank)])
        pending = gloo.recv([message.zero_()], 2, 0) if group.rank == 0 else None
        group.all_reduce(total, choice=choice)
        assert total.item() == 3.0
        if group.rank == 2:
            gloo.send([message], 0, 0).wait()
        if pending:
            pending.wait()
        return message.item()

    assert in_groups(3, on_rank, hosts=["a", "a", "b"], with_gloo=True)[0] == 42.0
