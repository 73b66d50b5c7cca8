"""`python -m bench.uneven_memory`: two workers of equal speed, one with little memory (root).

Memory is limited by control groups, so a rank that takes too much is killed. The plan must prevent that: smaller
micro-batches and shares on the rank with less memory, and a higher stage if stage 0 fits on neither.
"""

import json
import sys
from dataclasses import dataclass, replace
from typing import Annotated, Any

import typer
from rich.console import Console

from bench.heterogeneous.page import keep_cases, write
from bench.heterogeneous.rounds import IDEAL, OURS, Rows
from bench.heterogeneous.tasks import NOTHING, RanksFailedError, TrainingTask, train
from mimatrix.core.errors import UserError

MIB = 1 << 20
SPEEDS = (0.8, 0.8)
"""Of a core: other processes have the rest, and do not disturb."""
LEAST_FRACTION = 0.85
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class MemoryCase:
    """A task, and the memory of each rank on top of what the processes and their data take."""

    name: str
    task: TrainingTask
    room_bytes: tuple[int, int]
    stages: tuple[int, ...]
    """One of which the plan should choose."""
    least: float = LEAST_FRACTION
    """Of the ideal, which has all the memory that it wants."""


def cases() -> list[MemoryCase]:
    """Return two cases: a quarter of the memory on one rank, and too little memory on both for stage 0."""
    # Narrow and deep, so that a sample takes much memory compared with the model; then the other way round.
    deep = TrainingTask(OURS, SPEEDS, global_batch=3840, width=256, depth=32, optimizer="adamw", batches=4)
    wide = TrainingTask(OURS, SPEEDS, global_batch=768, width=2048, depth=8, optimizer="adamw", batches=4)
    return [
        MemoryCase("a quarter of the memory", deep, (320 * MIB, 80 * MIB), (0, 1, 2, 3)),
        MemoryCase("stage 0 fits nowhere", wide, (560 * MIB, 480 * MIB), (1, 2, 3), least=0.0),
    ]


def main(
    only: Annotated[str, typer.Option(help="A word of the one case to run; without, all.")] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of rows.")] = False,
    kept: Annotated[bool, typer.Option("--keep", help="Write the figures and the page to docs/measurements.")] = False,
) -> None:
    """Run each case and its ideal; fail if a worker dies or a row is below what is promised."""
    console = Console(stderr=True)
    rows: Rows = []
    asked = [case for case in cases() if only in case.name]
    for case in asked:
        with console.status(case.name):
            rows.append(measure(case))
    if kept:
        keep_cases(rows)
        write()
    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        for row in rows:
            print(_sentence(row))
    wrong = [problem for case, row in zip(asked, rows, strict=True) if (problem := problem_of(case, row))]
    sys.exit("; ".join(wrong) if wrong else 0)


def measure(case: MemoryCase) -> dict[str, Any]:
    """Measure one row: the plan, its throughput, and the ideal of two workers with unlimited memory."""
    base = before_bytes(case.task)
    limits = tuple(base + room for room in case.room_bytes)
    row: dict[str, Any] = {"who": OURS, "case": case.name, "room_bytes": case.room_bytes, "memory_bytes": limits}
    turns = [_run_round(case, limits, row) for _ in range(ROUNDS)]
    died = [turn for turn in turns if turn["died"]]
    if died:
        return died[0]
    fractions = sorted(turn["fraction_of_ideal"] for turn in turns)
    middle = next(turn for turn in turns if turn["fraction_of_ideal"] == fractions[ROUNDS // 2])
    return middle | {"fraction_spread": [fractions[0], fractions[-1]]}


def _run_round(case: MemoryCase, limits: tuple[int, ...], row: dict[str, Any]) -> dict[str, Any]:
    ideal = sum(record.rate for record in train(replace(case.task, who=IDEAL)))
    try:
        records = train(replace(case.task, memory_bytes=limits))
    except RanksFailedError as failure:
        return row | {"died": str(failure), "ideal": ideal}
    plan, step_s = records[0].plan, records[0].steady_s
    rate = case.task.global_batch / step_s
    return row | {
        "died": "",
        "ideal": ideal,
        "samples_per_s": rate,
        "fraction_of_ideal": rate / ideal,
        "stage": plan["stage"],
        "micro": plan["split"],
        "shares": plan["shares"],
        "measured_step_s": step_s,
        "predicted_step_s": plan["step_s"],
        "planning_s": records[0].before_s,
        "peak_bytes": [record.peak_bytes for record in records],
        "reasons": plan["reasons"],
    }


def before_bytes(task: TrainingTask) -> int:
    """Measure what a rank takes before it has a model: Python, torch, and its rows."""
    records = train(replace(task, who=NOTHING))
    return max(record.peak_bytes for record in records)


def problem_of(case: MemoryCase, row: dict[str, Any]) -> str:
    """Describe in a few words what is below the promise; empty if nothing is."""
    if row["died"]:
        return f"{case.name}: {row['died']}"
    if row["stage"] not in case.stages:
        return f"{case.name}: stage {row['stage']} was chosen, wanted one of {list(case.stages)}"
    roomy, tight = (max(sizes, default=0) for sizes in row["micro"])
    if case.least and tight >= roomy:
        return f"{case.name}: the small worker has micro-batches of {tight}, the large one of {roomy}"
    if row["stage"] and row["shares"][1] >= row["shares"][0]:
        return f"{case.name}: shares are {row['shares']}"
    if row["fraction_of_ideal"] < case.least:
        return f"{case.name}: {row['fraction_of_ideal']:.2f} of the ideal, wanted {case.least}"
    return ""


def _sentence(row: dict[str, Any]) -> str:
    if row["died"]:
        return f"{row['case']}: {row['died']}"
    micro = " and ".join(str(max(sizes, default=0)) for sizes in row["micro"])
    shares = " and ".join(f"{share:.2f}" for share in row["shares"])
    return (
        f"{row['case']}: stage {row['stage']}, micro-batches up to {micro}, shares {shares}, "
        f"{row['samples_per_s']:.0f} samples/s, {row['fraction_of_ideal']:.2f} of the ideal"
    )


if __name__ == "__main__":
    try:
        typer.run(main)
    except UserError as error:
        sys.exit(f"mimatrix: {error}")
