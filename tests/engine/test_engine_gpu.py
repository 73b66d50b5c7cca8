"""Unequal parts of one GPU (CUDA MPS) that play hosts give what one process gives, in every stage and over NCCL.

Needs an NVIDIA GPU. `mimatrix lab gpu` starts the parts; NCCL connects them as if each had a GPU of its own.
"""

import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mimatrix.lab import collect_gpu, mps_daemon, parse_parts

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
SCRIPTS = Path(__file__).parent / "scripts"
GPUS = "60:40GiB,25:20GiB,10:10GiB"
SHARDED = ("reduce_scatter", "all_gather")
Daemon = dict[str, str]


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with mps_daemon() as variables:
        yield variables


@pytest.mark.parametrize(
    ("parts", "hosts"), [(GPUS, "a,a,a"), (GPUS, "a,a,b"), (GPUS, "a,b,c"), ("60:40GiB,25:20GiB,cpu", "a,a,a")]
)
def test_unequal_parts_of_a_gpu_are_exact(tmp_path: Path, daemon: Daemon, parts: str, hosts: str) -> None:
    reports = reports_of(["on_gpu.py"], tmp_path, daemon, parts, hosts)
    check_exact(reports)
    carried = carriers_of(reports[0]["counters"])
    if len(set(hosts.split(","))) > 1:
        # Several hosts: NCCL carries every stage, and no GPU's tensor passes through Gloo.
        assert all(any("nccl" in name for name in carried[word]) for word in ("all_reduce", *SHARDED))
        assert not any("staged" in name for names in carried.values() for name in names)


def test_a_cpu_on_another_host_than_the_gpu_is_exact(tmp_path: Path, daemon: Daemon) -> None:
    reports = reports_of(["on_gpu.py"], tmp_path, daemon, "60:40GiB,cpu", "a,b")
    check_exact(reports)
    carried = carriers_of(reports[0]["counters"])
    assert not any("nccl" in name or "windows" in name for names in carried.values() for name in names)
    assert any("staged" in name for name in carried["all_reduce"])


@pytest.mark.parametrize(("parts", "hosts"), [(GPUS, "a,a,b"), (GPUS, "a,b,c"), ("60:40GiB,cpu", "a,b")])
def test_a_mode_is_chosen_on_several_hosts(tmp_path: Path, daemon: Daemon, parts: str, hosts: str) -> None:
    assert all(report["steps"] for report in reports_of(["on_gpu.py", "auto"], tmp_path, daemon, parts, hosts))


@pytest.mark.parametrize("nccl_host", ["", "one"], ids=["with NCCL", "without NCCL"])
def test_refused_peer_access_is_exact_and_told_once(tmp_path: Path, daemon: Daemon, nccl_host: str) -> None:
    more = {"NCCL_HOSTID": nccl_host} if nccl_host else {}
    reports = reports_of(["on_gpu.py", "refused"], tmp_path, daemon, GPUS, "a,a,a", **more)
    check_exact(reports)
    (line,) = [line for report in reports for line in report["warnings"]]
    assert "refused by the test" in line
    carried = carriers_of(reports[0]["counters"])
    assert "cuda windows" not in {name for names in carried.values() for name in names}
    assert {"host windows", "nccl"} & {name for names in carried.values() for name in names}


def test_habits_of_scripts_are_right_or_refused_on_unequal_parts_of_a_gpu(tmp_path: Path, daemon: Daemon) -> None:
    reports = reports_of(["habits_on_gpu.py"], tmp_path, daemon, GPUS, "a,a,a")
    for report in reports:
        assert max(report["apart"].values()) < 1e-10, report["apart"]
        assert "clip_grad_norm_ was called before the gradients are summed" in report["refused"]
    assert len(reports[0]["apart"]) == 8
    assert len({str(report["mask"]) for report in reports}) == len(reports), "ranks draw different dropout masks"


def check_exact(reports: list[dict[str, Any]]) -> None:
    for report in reports:
        assert len(report["apart"]) == 12
        assert max(report["apart"].values()) < 1e-10, report["apart"]
        assert report["profile"]["steps"] > 0


def carriers_of(counters: dict[str, int]) -> dict[str, Counter[str]]:
    """Return by collective what carried its calls."""
    carried: dict[str, Counter[str]] = {}
    for name, count in counters.items():
        collective, _, carrier = name.partition(" ")
        carried.setdefault(collective, Counter())[carrier] += count
    return carried


def reports_of(
    words: list[str], tmp_path: Path, daemon: Daemon, parts: str, hosts: str, **more: str
) -> list[dict[str, Any]]:
    """Run a script on the parts of a GPU, and return what each rank prints last."""
    script, *arguments = words
    ranks = collect_gpu(
        parse_parts(parts, hosts),
        [sys.executable, str(SCRIPTS / script), *arguments],
        env={"MIMATRIX_CACHE": str(tmp_path / "cache"), "MIMATRIX_ARENA": "256MiB", **more},
        timeout_s=100,
        daemon=daemon,
    )
    for rank in ranks:
        assert rank.returncode == 0, rank.stderr[-3000:]
    reports = [json.loads(rank.stdout.splitlines()[-1]) for rank in ranks]
    (tmp_path / "reports.json").write_text(json.dumps(reports, indent=1))
    return reports
