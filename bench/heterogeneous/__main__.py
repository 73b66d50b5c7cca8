"""`python -m bench.heterogeneous`: side by side on CPU workers of unequal speed, under quotas (root).

With --keep the figures are stored in docs/measurements/heterogeneous, and its page is written.
"""

import json
import sys
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from bench.heterogeneous.page import keep_speeds, write
from bench.heterogeneous.rounds import NAMES, OURS, Rows, compare, rows_of
from bench.heterogeneous.tasks import TrainingTask
from mimatrix.core.errors import UserError, nearest
from mimatrix.launch import parse_speeds

SPEEDS = ("1,0.25", "1,0.5,0.25")


def main(
    speeds: Annotated[
        list[str] | None, typer.Option(help="One run with these, as in 1,0.25; may be given often.")
    ] = None,
    rounds: Annotated[int, typer.Option(help="How often each has its turn.")] = 5,
    peer_rounds: Annotated[
        int | None, typer.Option(help="How often those that split evenly, but for DDP; without, as often as all.")
    ] = None,
    only: Annotated[str, typer.Option(help="Competitors, with commas; without, all.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="One round of short turns, for a first look.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a list of rows.")] = False,
    kept: Annotated[bool, typer.Option("--keep", help="Write the figures and the page to docs/measurements.")] = False,
) -> None:
    """Compare other systems with MiMatrix, as a fraction of what the workers would do each by itself."""
    names = _names(only)
    console = Console(stderr=True)
    rows: Rows = []
    with console.status("starting") as status:

        def show(what: str) -> None:
            status.update(what)
            if not console.is_terminal:
                console.print(what, highlight=False)

        for text in speeds or SPEEDS:
            base = _task(text, quick)
            rows += rows_of(compare(base, 1 if quick else rounds, names, show, peer_rounds=peer_rounds), names)
    if kept:
        keep_speeds(rows)
        write()
    if as_json:
        print(json.dumps(rows, indent=1))
    else:
        _print(rows)
    failed = [row for row in rows if row["who"] == OURS and row["note"]]
    sys.exit(f"mimatrix {failed[0]['note']}" if failed else 0)


def _task(text: str, quick: bool) -> TrainingTask:
    base = TrainingTask("", parse_speeds(text))
    if base.global_batch % base.ranks:
        raise UserError(f"{base.ranks} ranks cannot share {base.global_batch} samples evenly; use 2 to 6 ranks")
    return TrainingTask("", base.speeds, warm_up=3, seconds=2.0) if quick else base


def _names(only: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in only.split(",")) if only else NAMES
    for name in names:
        if name not in NAMES:
            raise UserError(f'unknown competitor "{name}"{nearest(name, NAMES)}')
    return names


def _print(rows: Rows) -> None:
    for speeds in dict.fromkeys(row["speeds"] for row in rows):
        table = Table(title=f"speeds {speeds}", title_justify="left", box=SIMPLE_HEAD, padding=0)
        table.add_column("who", no_wrap=True)
        for heading in ("samples/s", "of ideal", "spread", "x DDP", "step", "predicted", "planning"):
            table.add_column(heading, justify="right", no_wrap=True)
        for row in rows:
            if row["speeds"] == speeds:
                table.add_row(*_cells(row))
        Console(markup=False, highlight=False).print(table)


def _cells(row: dict[str, Any]) -> list[str]:
    if not row["rounds"]:
        return [row["who"], row["note"]]
    spread = row["fraction_spread"]
    return [
        row["who"],
        f"{row['samples_per_s']:.0f}",
        _figure(row["fraction_of_ideal"], "{:.2f}"),
        f"{spread[0]:.2f}-{spread[1]:.2f}" if spread else "",
        _figure(row["speedup_over_ddp"], "{:.2f}"),
        *(_figure(row[key], "{:.3f}s") for key in ("measured_step_s", "predicted_step_s")),
        _figure(row["planning_s"], "{:.0f}s"),
    ]


def _figure(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)


if __name__ == "__main__":
    try:
        typer.run(main)
    except UserError as error:
        sys.exit(f"mimatrix: {error}")
