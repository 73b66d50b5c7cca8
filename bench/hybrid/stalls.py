"""Time to a target where one group stalls at random: asynchronous groups, against synchronous training with a plan that follows."""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from math import inf
from pathlib import Path
from typing import Any

from bench import TESTS
from bench.hybrid.accuracy import CPUS, SPEEDS
from bench.markdown import table
from mimatrix.launch.throttle.cpu_quota import quotas

_SCRIPT = Path(__file__).parent / "scripts" / "to_target.py"
TARGET = 96.0
STALLED, TEN_TIMES = 1, 0.1
_PAUSE_S, _STALL_S = (2.0, 6.0), (2.0, 4.0)
_PATIENCE_S = 240.0
MODES = {
    "sync": "all together, plan follows",
    "hybrid": "four groups",
}
EPOCHS = {"sync": 30, "hybrid": 60}
"""Groups are through with twice as many sooner than all together: who has less time to the target is not cut short."""


def measure(rounds: int, stalls: bool = True) -> dict[str, Any]:
    """Return the seconds to the target in each mode, by round."""
    figures: dict[str, Any] = {"target": TARGET, **{mode: [] for mode in MODES}}
    for number in range(rounds):
        for mode in MODES if number % 2 else reversed(MODES):
            figures[mode].append(train_to_target(mode, number, stalls))
            shown = {key: value for key, value in figures[mode][-1].items() if key != "curve"}
            print(number, mode, shown, flush=True)
    return figures


def train_to_target(mode: str, seed: int, stalls: bool) -> dict[str, Any]:
    """Run four processes under quotas."""
    cpus = {rank: CPUS * speed for rank, speed in enumerate(SPEEDS)}
    slow = len(cpus)
    with tempfile.TemporaryDirectory() as name, quotas(cpus | {slow: TEN_TIMES * cpus[STALLED]}) as joins:
        folder = Path(name)
        words = [sys.executable, "-m", "mimatrix.cli.main", "run", "-n", str(len(cpus)), "--threads", "1"]
        words += ["--groups", "/".join(map(str, cpus))] if mode != "sync" else []
        words += [str(_SCRIPT), mode, str(EPOCHS[mode]), str(seed), str(folder)]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([*(sys.path[:1] or ["."]), TESTS])}
        with subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL) as process:
            try:
                pids = [int(_wait_for(folder / f"pid-{rank}", process)) for rank in cpus]
                for rank, pid in enumerate(pids):
                    joins[rank].write_text(str(pid))
                (folder / "slowed").touch()
                for rank in cpus:
                    _wait_for(folder / f"ready-{rank}", process)
                for pid in _service_pids(pids):
                    (joins[0].parents[1] / joins[0].name).write_text(str(pid))
                over = threading.Event()
                stalling = threading.Thread(
                    target=_stall, args=(pids[STALLED], joins[slow], joins[STALLED], random.Random(seed), over)
                )
                (folder / "go").touch()
                if stalls:
                    stalling.start()
                _wait_for(folder / "ended-0", process)
                over.set()
                if stalls:
                    stalling.join(10)
                figures = json.loads(_wait_for(folder / "found-0", process))
                others = [json.loads(_wait_for(folder / f"found-{rank}", process)) for rank in cpus if rank]
                process.wait(30)
            finally:
                process.kill()
    reached = [at_s for at_s, accuracy in figures["curve"] if accuracy >= TARGET]
    return {
        "to_target_s": reached[0] if reached else None,
        "seconds": figures["seconds"],
        "steps": [each["steps"] for each in (figures, *others)],
        "waiting": [each["waiting"] for each in (figures, *others)],
        "moving": [each["moving"] for each in (figures, *others)],
        "last": figures["curve"][-1][1],
        "curve": figures["curve"],
    }


def _stall(pid: int, slow: Path, usual: Path, chance: random.Random, over: threading.Event) -> None:
    """Slow a process ten times for seconds, again and again."""
    try:
        while not over.wait(chance.uniform(*_PAUSE_S)):
            slow.write_text(str(pid))
            over.wait(chance.uniform(*_STALL_S))
            usual.write_text(str(pid))
    except OSError:  # it has ended
        pass


def _service_pids(parents: list[int]) -> list[int]:
    """Return the processes that serve shards for these ranks."""
    pids = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            words, parent = (
                (path / "cmdline").read_bytes(),
                int((path / "stat").read_text().rpartition(")")[2].split()[1]),
            )
        except OSError:
            continue
        if b"mimatrix.hybrid.server.process" in words and parent in parents:
            pids.append(int(path.name))
    return pids


def _wait_for(file: Path, process: "subprocess.Popen[bytes]") -> str:
    deadline = time.monotonic() + _PATIENCE_S
    while not (file.is_file() and (file.stat().st_size or file.name.startswith("ended"))):
        if time.monotonic() > deadline or process.poll():
            raise TimeoutError(f"{file.name} did not come within {_PATIENCE_S:g} s (code {process.poll()})")
        time.sleep(0.02)
    time.sleep(0.02)
    return file.read_text()


def _spread(values: list[float], digits: str) -> str:
    """Return median, minimum and maximum; a run that did not reach the target counts as infinitely late."""
    middle, least, most = statistics.median(values), min(values), max(values)
    return f"{middle:{digits}} ({least:{digits}} to {'never' if most == inf else format(most, digits)})"


def section(figures: dict[str, Any]) -> str:
    """Return this part of the page."""
    rows = []
    for mode in MODES:
        times = [run["to_target_s"] or inf for run in figures[mode]]
        # Who never came there has taken at least its whole run.
        whole = [run["to_target_s"] or run["seconds"] for run in figures["sync"]]
        ratios = [each / other for each, other in zip(times, whole, strict=True)]
        fast = {key: statistics.median(run[key][0] for run in figures[mode]) for key in ("waiting", "moving")}
        rows.append(
            [
                MODES[mode],
                _spread(times, ".1f"),
                _spread(ratios, ".2f"),
                f"{fast['waiting']:.1%}",
                f"{fast['moving']:.1%}",
                f"{statistics.median(run['last'] for run in figures[mode]):.1f} %",
            ]
        )
    headings = [
        "",
        "seconds to the target",
        "of all together",
        "the first waits for others",
        "moves data",
        "at the end",
    ]
    took = {mode: statistics.median(run["seconds"] for run in figures[mode]) for mode in MODES}
    return f"""## Time to a target, with stalls
`python -m bench.hybrid stalls`

Digits as above, with a frozen net next to it so that a step is mostly computing; four processes of speeds 1, 1, 0.5, 0.25 under quotas, of which the second becomes ten times
slower for {_STALL_S[0]:g} to {_STALL_S[1]:g} s every {_PAUSE_S[0]:g} to {_PAUSE_S[1]:g} s. Seconds until {figures["target"]:g} % of test samples are right; median and range of {len(figures["sync"])} rounds in which each had its turn. Services
have no quota: what stalls is what computes. All
together train for {EPOCHS["sync"]} epochs in {took["sync"]:.0f} s, groups for {EPOCHS["hybrid"]} in {took["hybrid"]:.0f} s.

{table(headings, rows)}"""
