"""Whether `mode="auto"` chooses the faster mode: lab scenarios in which both are run.

In each, ranks decide for themselves and train in what they chose until an accuracy is reached, then in the other mode.
Run by `python -m bench.hybrid.auto_mode`; with --keep the figures are stored, for `python -m bench.hybrid page`.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from math import inf
from typing import Annotated, Any

import typer

from bench.allreduce.common import command
from bench.markdown import MEASUREMENTS, machine, table

NAME = "choosing"


@dataclass(frozen=True)
class ModeScenario:
    """A cluster of the lab, the processors of its nodes, and what is trained."""

    cluster: str
    cpus: str
    net: str
    batch: int


SCENARIOS = (
    ModeScenario("star:2,rate=1Gbit", "0.8,0.8", "mlp:256x3", 64),
    ModeScenario("star:4,rate=1Gbit", "0.4,0.4,0.4,0.4", "conv:16x3", 32),
    ModeScenario("star:4,rate=10Mbit", "0.4,0.4,0.4,0.4", "mlp:256x3", 64),
    ModeScenario("star:2,rate=1Gbit", "0.8,0.8", "conv:32x4", 256),
    ModeScenario("star:3,rate=100Mbit", "0.8,0.4,0.2", "mlp:512x5", 128),
    ModeScenario("star:4,rate=1Gbit", "0.4,0.4,0.4,0.4", "conv:32x4", 512),
    ModeScenario("star:3,rate=400Mbit", "0.8,0.4,0.2", "conv:32x3", 256),
    ModeScenario("star:4,rate=100Mbit", "0.6,0.4,0.4,0.2", "conv:16x3", 64),
    ModeScenario("leaf_spine:2x2,rate=200Mbit,oversubscription=10,spines=1", "0.4,0.4,0.4,0.4", "mlp:512x5", 128),
    ModeScenario("star:2,devices=2,rate=50Mbit", "0.8,0.8", "mlp:512x5", 128),
)


@contextmanager
def lab(scenario: ModeScenario) -> Iterator[None]:
    """Run a lab, and remove it afterwards."""
    command("lab", "up", scenario.cluster, "--cpus", scenario.cpus, "--name", NAME)
    try:
        yield
    finally:
        command("lab", "down", "--name", NAME)


def run_scenario(scenario: ModeScenario, seconds: float) -> dict[str, Any]:
    """Run a scenario; return what was chosen, and the figures of both modes."""
    words = ["bench.hybrid.auto_mode_rank", scenario.net, str(scenario.batch), str(seconds)]
    os.environ["MIMATRIX_CACHE"] = tempfile.mkdtemp()
    with lab(scenario):
        inside = [sys.executable, "-m", *words]
        said = command("lab", "run", "--name", NAME, "--timeout", "5min", "--", *inside, timeout_s=330)
    lines = [line.split("] ", 1)[1] for line in said.splitlines() if "] {" in line]
    records: list[dict[str, Any]] = [json.loads(line) for line in lines]
    choice = next(each for each in records if "chosen" in each)
    modes = {mode: [each for each in records if each.get("mode") == mode] for mode in ("sync", "hybrid")}
    firsts = {mode: next(each for each in parts if each["group"] == 0) for mode, parts in modes.items()}
    return {
        **asdict(scenario),
        **choice,
        "measured": {mode: sum(each["samples_per_s"] for each in parts) for mode, parts in modes.items()},
        "to_target_s": {mode: first["to_target_s"] for mode, first in firsts.items()},
        "seconds": {mode: first["seconds"] for mode, first in firsts.items()},
        "curves": {mode: first["curve"] for mode, first in firsts.items()},
        "target": firsts["sync"]["target"],
    }


def seconds_to_target(row: dict[str, Any], mode: str) -> float:
    """Return the seconds to the target, infinite if it was not reached."""
    return float(row["to_target_s"][mode] or inf)


def is_right(row: dict[str, Any]) -> bool:
    """Return whether the faster mode was chosen; False if neither has reached the target."""
    other = "sync" if row["chosen"] == "hybrid" else "hybrid"
    return seconds_to_target(row, row["chosen"]) < inf and seconds_to_target(row, row["chosen"]) <= seconds_to_target(
        row, other
    )


def measure(seconds: float, only: int | None = None) -> dict[str, Any]:
    """Run all scenarios, or one."""
    began, rows = time.monotonic(), []
    for number, scenario in enumerate(SCENARIOS):
        if only in (None, number):
            started = time.monotonic()
            rows.append(run_scenario(scenario, seconds))
            shown = {key: value for key, value in rows[-1].items() if key not in ("curves", "figures")}
            right = "right" if is_right(rows[-1]) else "wrong"
            print(f"{number}: {time.monotonic() - started:.0f} s, {right}\n{json.dumps(shown)}", flush=True)
    return {"machine": machine(), "patience_s": seconds, "took_s": time.monotonic() - began, "scenarios": rows}


def section(figures: dict[str, Any]) -> str:
    """Return this part of the page."""
    rows = [
        [
            f"`{row['cluster']}`, CPUs {row['cpus']}, {row['net']}, batch {row['batch']}",
            f"{row['predicted']['sync']:.0f} / {row['measured']['sync']:.0f}",
            f"{row['predicted']['hybrid']:.0f} / {row['measured']['hybrid']:.0f}",
            f"{row['worth']:.0f}",
            _format_seconds(row, "sync"),
            _format_seconds(row, "hybrid"),
            row["chosen"],
            "yes" if is_right(row) else "**no**",
        ]
        for row in figures["scenarios"]
    ]
    headings = [
        "scenario",
        "all together, samples/s predicted / measured",
        "groups",
        "worth, predicted",
        "all together, seconds to the target",
        "groups",
        "chosen",
        "right",
    ]
    right = sum(map(is_right, figures["scenarios"]))
    reasons = "\n".join(f"{number}. {row['reason']}" for number, row in enumerate(figures["scenarios"], 1))
    return f"""## Which mode `mode="auto"` chooses
`python -m bench.hybrid.auto_mode --keep`, {figures["took_s"] / 60:.0f} minutes

In each scenario ranks of the lab decide for themselves, and train in what they chose; then in the other mode, in the way of it that was priced. What is learned are ten clouds, as rows or
as pictures, until 90 % of the best accuracy that is possible. Seconds from the end of the first step, in each mode for {figures["patience_s"]:g} s at most. The faster mode was chosen in **{right} of
{len(figures["scenarios"])}** scenarios.

{table(headings, rows)}
Its reasons, in the same order:

{reasons}
"""


def _format_seconds(row: dict[str, Any], mode: str) -> str:
    at_s = row["to_target_s"][mode]
    part = row["curves"][mode][-1][1] / row["target"]
    return f"{at_s:.1f}" if at_s else f"not in {row['seconds'][mode]:.0f}, {part:.0%} of it"


def main(
    seconds: Annotated[float, typer.Option(help="Of each mode in each scenario, at most.")] = 30.0,
    only: Annotated[int | None, typer.Option(help="One scenario, by its number from 0.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the figures.")] = False,
) -> None:
    """Run all scenarios (root, as every lab)."""
    figures = measure(seconds, only)
    if keep:
        (MEASUREMENTS / "hybrid" / "choosing.json").write_text(json.dumps(figures, indent=1) + "\n")
    print(section(figures))


if __name__ == "__main__":
    typer.run(main)
