"""Run the tests of GPU ranks several at a time, and keep what they found: `python -m bench.allreduce.gpu_ranks FOLDER`.

On a machine with an NVIDIA GPU, from the root of the repository: parts of the GPU play unlike GPUs on one, two and three
hosts. Writes `gpu_ranks.json` (exactness, what carried what) and `gpu_kills.json` (ranks that were killed).
"""

import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from mimatrix.lab import mps_daemon

sys.path[:0] = [".", "tests"]
lost: Any = import_module("tests.comm.test_gpu_lost_ranks")
ranks: Any = import_module("tests.engine.test_engine_gpu")
AT_ONCE = 4
Case = Callable[[Path, dict[str, str]], None]


def _exact(parts: str, hosts: str) -> Case:
    return lambda folder, daemon: ranks.test_unequal_parts_of_a_gpu_are_exact(folder, daemon, parts, hosts)


def _auto(parts: str, hosts: str) -> Case:
    return lambda folder, daemon: ranks.test_a_mode_is_chosen_on_several_hosts(folder, daemon, parts, hosts)


def _refused(nccl_host: str) -> Case:
    return lambda folder, daemon: ranks.test_refused_peer_access_is_exact_and_told_once(folder, daemon, nccl_host)


CASES: dict[str, Case] = {
    "three GPUs on one host": _exact(ranks.GPUS, "a,a,a"),
    "2 + 1 GPUs on two hosts": _exact(ranks.GPUS, "a,a,b"),
    "three GPUs on three hosts": _exact(ranks.GPUS, "a,b,c"),
    "two GPUs and a CPU on one host": _exact("60:40GiB,25:20GiB,cpu", "a,a,a"),
    "a GPU and a CPU on two hosts": ranks.test_a_cpu_on_another_host_than_the_gpu_is_exact,
    "refused peer access, with NCCL": _refused(""),
    "refused peer access, without NCCL": _refused("one"),
    'mode="auto", 2 + 1 GPUs on two hosts': _auto(ranks.GPUS, "a,a,b"),
    'mode="auto", three GPUs on three hosts': _auto(ranks.GPUS, "a,b,c"),
    'mode="auto", a GPU and a CPU on two hosts': _auto("60:40GiB,cpu", "a,b"),
    "habits of scripts": ranks.test_habits_of_scripts_are_right_or_refused_on_unequal_parts_of_a_gpu,
}


def main(folder: Path) -> None:
    """Run all cases, then the kills, which may harm whatever else runs on the GPU."""
    folder.mkdir(parents=True, exist_ok=True)
    with mps_daemon() as daemon, ThreadPoolExecutor(AT_ONCE) as pool:
        found = dict(zip(CASES, pool.map(partial(run_case, daemon), CASES), strict=True))
    write(folder / "gpu_ranks.json", found)
    before = lost.used_mib()
    gentle, harsh = lost.WAYS[:-2], lost.WAYS[-2:]
    with mps_daemon() as daemon, ThreadPoolExecutor(AT_ONCE) as pool:
        tries = list(pool.map(partial(kill, daemon), gentle))
    with mps_daemon() as daemon:
        tries += [kill(daemon, way) for way in harsh]
    write(folder / "gpu_kills.json", {"tries": tries, "memory": "not checked"})
    for attempt in tries:
        lost.check(attempt)
    lost.wait_until_free(before)
    without_stderr = [{key: value for key, value in attempt.items() if key != "stderr"} for attempt in tries]
    write(folder / "gpu_kills.json", {"tries": without_stderr, "memory": "free"})
    if failed := [name for name, case in found.items() if case["result"] != "passed"]:
        sys.exit(f"failed: {', '.join(failed)}")


def run_case(daemon: dict[str, str], name: str) -> dict[str, Any]:
    """Run one case in a folder of its own; return what the page needs of its reports."""
    folder, started = Path(tempfile.mkdtemp()), time.monotonic()
    result: dict[str, Any] = {"result": "passed"}
    try:
        CASES[name](folder, daemon)
    except Exception:  # noqa: BLE001 (the other cases still run)
        result = {"result": "failed", "why": traceback.format_exc()[-2000:]}
    result["seconds"] = round(time.monotonic() - started, 1)
    reports = folder / "reports.json"
    if reports.exists():
        result |= summary(json.loads(reports.read_text()))
    print(name, result["result"], result.get("why", ""), flush=True)
    return result


def summary(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how far ranks are apart at the most, and of rank 0 what carried what."""
    first = reports[0]
    figures: dict[str, Any] = {
        key: first[key] for key in ("counters", "transports", "profile", "warnings") if key in first
    }
    if isinstance(first.get("apart"), dict):
        figures["apart"] = {name: max(report["apart"][name] for report in reports) for name in first["apart"]}
    if "batches" in first:
        figures["chosen"] = [{key: report[key] for key in ("stage", "batches", "steps")} for report in reports]
    return figures


def kill(daemon: dict[str, str], way: str) -> dict[str, Any]:
    """Kill a rank; return what became of the others."""
    found: dict[str, Any] = lost.kill(way, Path(tempfile.mkdtemp()), daemon)
    return found


def write(file: Path, content: object) -> None:
    """Write JSON."""
    file.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
