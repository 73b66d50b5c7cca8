"""The backend in torch.distributed, with real processes: what each script in scripts/ says of itself must hold."""

import ast
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPTS = Path(__file__).parent / "scripts"
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def run_script(cache: Path, *arguments: str | Path, timeout_s: float = 60.0, **variables: str) -> list[Any]:
    """Run a script of scripts/ with these variables and return the lines of JSON that it prints."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *map(str, arguments)],
        cwd=SCRIPTS,
        env=os.environ | {"MIMATRIX_CACHE": str(cache), "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1"} | variables,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line[:1] in '{"']


def test_torch_finds_the_backend_when_it_is_imported() -> None:
    code = 'import sys, torch.distributed as d; sys.exit("mimatrix" not in d.Backend.backend_list)'
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_import_of_torch_loads_no_more_than_the_registration() -> None:
    code = 'import sys, torch; print([name for name in sys.modules if name.split(".")[0] in ("mimatrix", "scipy")])'
    done = subprocess.run([sys.executable, "-c", code], timeout=60, check=True, capture_output=True, text=True)
    loaded = set(ast.literal_eval(done.stdout))
    assert loaded == {
        "mimatrix",
        "mimatrix.core",
        "mimatrix.core.errors",
        "mimatrix.comm",
        "mimatrix.comm.accelerate_backend",
        "mimatrix.comm.registration",
    }


@pytest.mark.long
def test_backend_is_found_by_its_name_under_torchrun(tmp_path: Path) -> None:
    (told,) = run_script(tmp_path, *TORCHRUN, "without_import.py")
    assert told == {"backend": "mimatrix", "averages": [3, -3]}


def test_backend_gives_the_results_of_gloo_for_every_collective(tmp_path: Path) -> None:
    (counters,) = run_script(tmp_path, "collectives.py")
    for word in ("all_reduce", "all_gather", "reduce_scatter", "broadcast"):
        assert counters[f"{word} windows"] >= 10
        assert counters[f"{word} gloo"] >= 10
    for word in ("reduce", "all_to_all", "gather", "scatter", "send", "recv"):
        assert counters[f"{word} gloo"] >= 3


def test_process_groups_are_created_and_destroyed_without_leaks(tmp_path: Path) -> None:
    counted, *scenarios = run_script(tmp_path, "groups.py")
    assert scenarios == ["sub_groups", "beside_gloo", "again", "never_destroyed", "in_order"]
    assert sum(counted["world"].values()) == 4


def test_ddp_buckets_are_read_in_place(tmp_path: Path) -> None:
    told = run_script(tmp_path, "buckets.py", MIMATRIX_TRANSPORT="windows")
    assert len(told) == 6
    assert {each["apart"] for each in told} == {0.0}
    for each in told:
        shares = each["scenario"] != "one without" or each["rank"] == 0
        assert (each["shared"] >= 2) == shares, told


@pytest.fixture(scope="module")
def tutorials(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where both tutorials left their parameters, for both backends and 2 and 4 ranks."""
    folder = tmp_path_factory.mktemp("tutorials")
    run_script(folder, "tutorials.py", folder, timeout_s=100, MIMATRIX_TRANSPORT="windows")
    return folder


def differences(folder: Path, name: str, one: str, other: str) -> tuple[dict[str, float], dict[str, int]]:
    """Return the largest difference of parameters for each way to train, and how often each transport ran."""
    theirs, ours = (torch.load(folder / f"{name}-{each}" / "found.pt") for each in (one, other))
    assert theirs["parameters"].keys() == ours["parameters"].keys()
    apart: dict[str, float] = {}
    for key, value in theirs["parameters"].items():
        way = key.rpartition(" ")[0]
        apart[way] = max(apart.get(way, 0.0), float((value - ours["parameters"][key]).abs().max()))
    return apart, ours["counters"]


COLLECTIVES = {"ddp": ("all_reduce", "broadcast"), "fsdp2": ("all_gather", "reduce_scatter", "all_reduce")}


def check_transport(name: str, counters: dict[str, int]) -> None:
    """Check that windows carried them: the transport is requested, as the tuner may choose otherwise under load."""
    for word in COLLECTIVES[name]:
        assert counters.get(f"{word} windows", 0) > 0, counters


@pytest.mark.long
@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_tutorial_under_torchrun_gives_the_parameters_of_gloo(name: str, tutorials: Path) -> None:
    """With two ranks there is one order to add in, so all of them are the same to the last bit."""
    place = tutorials / f"{name}-torchrun"
    place.mkdir()
    run_script(tutorials, *TORCHRUN, f"{name}.py", "mimatrix", place / "found.pt", MIMATRIX_TRANSPORT="windows")
    apart, counters = differences(tutorials, name, "gloo-2", "torchrun")
    assert len(apart) == (7 if name == "ddp" else 3)
    assert set(apart.values()) == {0.0}
    check_transport(name, counters)


@pytest.mark.parametrize("name", ["ddp", "fsdp2"])
def test_tutorial_on_four_ranks_gives_the_parameters_of_gloo(name: str, tutorials: Path) -> None:
    apart, counters = differences(tutorials, name, "gloo-4", "mimatrix-4")
    # Sums of four numbers in 16 bits are rounded in another order.
    limits = {"compressed": 1e-3, "mixed": 1e-3}
    assert all(value <= limits.get(way, 1e-10) for way, value in apart.items()), apart
    check_transport(name, counters)


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what was said in every scenario of faults.py."""
    return run_script(tmp_path_factory.mktemp("faults"), "faults.py", timeout_s=100)


def heard(faults: Sequence[dict[str, Any]], scenario: str) -> dict[int, dict[str, Any]]:
    return {each["rank"]: each for each in faults if each["scenario"] == scenario and "rank" in each}


MISMATCHES = (
    "other length",
    "other class",
    "known and unknown",
    "other type",
    "other collective",
    "other collective, c10d",
)


@pytest.mark.parametrize("scenario", MISMATCHES)
def test_a_mismatch_is_raised_on_all_ranks(scenario: str, faults: list[dict[str, Any]]) -> None:
    told = heard(faults, scenario)
    assert sorted(told) == [0, 1, 2]
    for each in told.values():
        assert each["error"] == "MismatchError"
        assert "ranks disagree at call number" in each["text"]
        assert each["took_s"] < 5


@pytest.mark.parametrize(
    ("scenario", "lost", "doing"),
    [
        ("fails in backward, windows", 1, "all_reduce of 121 float32"),
        ("fails in backward, c10d", 1, "all_reduce"),
        ("killed", 0, "all_reduce of 10 float32"),
        ("raised", 1, "all_gather"),
        ("between two", 1, "recv"),
    ],
)
def test_a_lost_rank_is_named(scenario: str, lost: int, doing: str, faults: list[dict[str, Any]]) -> None:
    told = heard(faults, scenario)
    assert sorted(told) == [rank for rank in range(3) if rank != lost]
    for each in told.values():
        # Autograd turns every error of DDP's into a RuntimeError, which still says what it was.
        assert each["error"] == "PeerLost" or "PeerLost" in each["text"]
        assert f"rank {lost} on " in each["text"]
        assert f"was lost in {doing}" in each["text"]
        assert each["took_s"] < 5


def test_no_rank_hangs_or_crashes_after_a_fault(faults: list[dict[str, Any]]) -> None:
    ended = {each["scenario"]: each["ended"] for each in faults if "ended" in each}
    on_purpose = {"on_windows": [0, 7, 0], "on_c10d": [0, 7, 0], "killed": [-9, 0, 0]}
    assert len(ended) == 11
    assert ended == {name: on_purpose.get(name, [0, 0, 0]) for name in ended}
