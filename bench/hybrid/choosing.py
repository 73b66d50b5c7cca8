"""Whether `mode="auto"` chooses the faster mode: lab scenarios in which both are run. `python -m bench.hybrid.choosing`

In each, ranks decide for themselves and train for some seconds in what they chose, then in the other mode. Samples a
second of groups count by how late their pushes were (`planner.modes.worth`). With --keep the figures are kept, for
`python -m bench.hybrid page`.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from bench.allreduce.common import command
from bench.markdown import MEASUREMENTS, machine, table
from mimatrix.planner.modes import LATE, worth

NAME = "choosing"
_NEAR = 0.05
"""Modes that differ by less than this are as good as each other."""


@dataclass(frozen=True)
class Scenario:
    """A cluster of the lab, the processors of its nodes, and what is trained."""

    cluster: str
    cpus: str
    net: str
    batch: int


SCENARIOS = (
    Scenario("star:2,rate=1Gbit", "0.8,0.8", "mlp:256x3", 64),
    Scenario("star:4,rate=1Gbit", "0.4,0.4,0.4,0.4", "conv:16x3", 32),
    Scenario("star:4,rate=10Mbit", "0.4,0.4,0.4,0.4", "mlp:256x3", 64),
    Scenario("star:4,rate=50Mbit", "0.4,0.4,0.4,0.4", "mlp:512x5", 128),
    Scenario("star:3,rate=100Mbit", "0.8,0.4,0.2", "mlp:512x5", 128),
    Scenario("star:2,rate=10Mbit", "0.8,0.8", "conv:16x3", 64),
    Scenario("star:4,rate=400Mbit", "0.4,0.4,0.4,0.4", "mlp:1024x5", 64),
    Scenario("star:4,rate=100Mbit", "0.6,0.4,0.4,0.2", "conv:16x3", 64),
    Scenario("leaf_spine:2x2,rate=200Mbit,oversubscription=10,spines=1", "0.4,0.4,0.4,0.4", "mlp:512x5", 128),
    Scenario("star:2,devices=2,rate=50Mbit", "0.8,0.8", "mlp:512x5", 128),
)


@contextmanager
def lab(scenario: Scenario) -> Iterator[None]:
    """A lab that is gone afterwards."""
    command("lab", "up", scenario.cluster, "--cpus", scenario.cpus, "--name", NAME)
    try:
        yield
    finally:
        command("lab", "down", "--name", NAME)


def tried(scenario: Scenario, seconds: float) -> dict[str, Any]:
    """What was chosen, and what both modes made."""
    words = ["bench.hybrid.choosing_rank", scenario.net, str(scenario.batch), str(seconds)]
    os.environ["MIMATRIX_CACHE"] = tempfile.mkdtemp()
    with lab(scenario):
        inside = [sys.executable, "-m", *words]
        said = command("lab", "run", "--name", NAME, "--timeout", "4min", "--", *inside, timeout_s=300)
    lines = [line.split("] ", 1)[1] for line in said.splitlines() if "] {" in line]
    found: list[dict[str, Any]] = [json.loads(line) for line in lines]
    choice = next(each for each in found if "chosen" in each)
    modes = {mode: [each for each in found if each.get("mode") == mode] for mode in ("sync", "hybrid")}
    rates = {mode: sum(each["samples_per_s"] for each in parts) for mode, parts in modes.items()}
    late = [each["staleness"] for each in modes["hybrid"]]
    counted = sum(each["samples_per_s"] * worth(each["staleness"]) for each in modes["hybrid"])
    return {
        **asdict(scenario),
        **choice,
        "measured": rates,
        "worth_measured": counted,
        "staleness_measured": sum(late) / len(late),
        "seconds": min(each["seconds"] for parts in modes.values() for each in parts),
    }


def is_right(row: dict[str, Any]) -> bool:
    """Whether the faster mode was chosen."""
    better = "hybrid" if row["worth_measured"] > row["measured"]["sync"] else "sync"
    return bool(row["chosen"] == better)


def is_near(row: dict[str, Any]) -> bool:
    """Whether both modes are as good as each other."""
    return bool(abs(row["worth_measured"] / row["measured"]["sync"] - 1) < _NEAR)


def measured(seconds: float = 6.0, only: int | None = None) -> dict[str, Any]:
    """All scenarios, or one."""
    began, rows = time.monotonic(), []
    for number, scenario in enumerate(SCENARIOS):
        if only in (None, number):
            started = time.monotonic()
            rows.append(tried(scenario, seconds))
            print(
                f"{number}: {time.monotonic() - started:.0f} s, {'right' if is_right(rows[-1]) else 'wrong'}",
                flush=True,
            )
            print(json.dumps(rows[-1], indent=1), flush=True)
    return {"machine": machine(), "late": LATE, "took_s": time.monotonic() - began, "scenarios": rows}


def section(found: dict[str, Any]) -> str:
    """For the page."""
    rows = [
        [
            f"`{row['cluster']}`, CPUs {row['cpus']}, {row['net']}, batch {row['batch']}",
            f"{row['predicted']['sync']:.0f}",
            f"{row['measured']['sync']:.0f}",
            f"{row['predicted']['hybrid']:.0f}",
            f"{row['measured']['hybrid']:.0f}",
            f"{row['worth']:.0f}",
            f"{row['worth_measured']:.0f}",
            row["chosen"],
            ("yes" if is_right(row) else "**no**") + (" (near)" if is_near(row) else ""),
        ]
        for row in found["scenarios"]
    ]
    headings = [
        "scenario",
        "sync, predicted",
        "measured",
        "hybrid, predicted",
        "measured",
        "worth, predicted",
        "measured",
        "chosen",
        "right",
    ]
    right = sum(map(is_right, found["scenarios"]))
    reasons = "\n".join(f"{number}. {row['reason']}" for number, row in enumerate(found["scenarios"], 1))
    return f"""## Which mode `mode="auto"` chooses
`python -m bench.hybrid.choosing`, {found["took_s"] / 60:.0f} minutes

Samples a second; those of groups are worth (1 + t)^-{found["late"]:g} each, t being how late their pushes are. The faster mode was chosen in {right} of
{len(found["scenarios"])} scenarios.

{table(headings, rows)}
Its reasons, in the same order:

{reasons}
"""


def main(
    seconds: Annotated[float, typer.Option(help="Of each mode in each scenario.")] = 6.0,
    only: Annotated[int | None, typer.Option(help="One scenario, by its number from 0.")] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the figures.")] = False,
) -> None:
    """Run all scenarios; root, as every lab."""
    found = measured(seconds, only)
    if keep:
        (MEASUREMENTS / "hybrid" / "choosing.json").write_text(json.dumps(found, indent=1) + "\n")
    print(section(found))


if __name__ == "__main__":
    typer.run(main)
