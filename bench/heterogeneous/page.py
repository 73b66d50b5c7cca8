"""docs/measurements/heterogeneous.md, written from the figures that are stored next to it."""

import json
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from bench.heterogeneous.pictures import drift_line, fraction_bars
from bench.heterogeneous.rounds import Rows
from bench.heterogeneous.tasks import TrainingTask
from bench.markdown import MEASUREMENTS, machine, table, write_page

FOLDER = MEASUREMENTS / "heterogeneous"
SPEEDS, DRIFT, MEMORY, GPU = "speeds", "drift", "memory", "gpu"
_STEADY = 20
"""This many steps at the end of a run with a drop are those of its last plan."""
_HOUR_S, _SHARE = 3600.0, 0.02
"""Planning time is given as a share of a run of this length, and as the length of a run of which it is this share."""


def keep(name: str, value: object) -> None:
    """Store the figures of one part, for the page."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{name}.json").write_text(json.dumps(value, indent=1) + "\n")


def keep_speeds(rows: Rows) -> None:
    """Replace the stored rows of these speeds; others stay."""
    ours = {row["speeds"] for row in rows}
    others = [row for row in _load(SPEEDS) or [] if row["speeds"] not in ours]
    keep(SPEEDS, sorted([*others, *rows], key=lambda row: len(row["speeds"])))


def keep_cases(rows: Rows) -> None:
    """Replace the stored rows of these cases of little memory; others stay."""
    ours = {row["case"] for row in rows}
    keep(MEMORY, [*rows, *(row for row in _load(MEMORY) or [] if row["case"] not in ours)])


def write() -> None:
    """Write the page and its pictures from all stored figures."""
    parts: dict[str, Callable[[Any], str]] = {SPEEDS: _speeds, DRIFT: _drift, MEMORY: _memory, GPU: _gpu}
    figures = {name: _load(name) for name in parts}
    sections = [part(figures[name]) for name, part in parts.items() if figures[name]]
    sections += [_predictions(figures), _planning(figures)]
    task = TrainingTask("", (1.0,))
    write_page(
        "heterogeneous.md",
        f"""# Workers of unlike speed

{machine()}, one thread for each rank, each slow rank in a control group with its part of a processor. The model is {task.depth} linear layers of
{task.width} with ReLU between them, float32, SGD with momentum, a global batch of {task.global_batch} samples in memory; all read the same rows by index.

{"".join(sections)}""",
    )


def _speeds(rows: Rows) -> str:
    fraction_bars(rows).savefig(FOLDER / "fractions.png", dpi=150)
    text = """## 1. Side by side

Made by `python -m bench.heterogeneous --keep`. In every round each competitor has one turn, in rotated order, in fresh processes; figures are
medians over the rounds, with the least and the most. A turn is timed on rank 0 over whole steps after the warm-up; ranks meet in each.

The **ideal** is measured in every round too: each rank runs the plain loop (forward, backward, optimizer, no communication) at the micro-batch of 64,
128, 256 or 512 that is fastest for it, all ranks at the same time under the same quotas, for the same seconds; the rates are summed. A fraction is taken
within its round. *Planning*: seconds from when the ranks had met to the first step, in which MiMatrix measures the ranks and their collectives and
plans, with an empty cache. *Loss*: the largest difference of a step's loss from DDP's, as a part of it: all do the same work.

![Fraction of the ideal](heterogeneous/fractions.png)

"""
    headings = [
        "speeds",
        "who",
        "samples/s",
        "of the ideal",
        "least to most",
        "x DDP",
        "step [s]",
        "predicted [s]",
        "planning [s]",
        "loss",
    ]
    return text + table(headings, [_line(row) for row in rows]) + "\n"


def _line(row: dict[str, Any]) -> list[str]:
    low, high = row["fraction_spread"] or (None, None)
    return [
        row["speeds"],
        row["who"],
        _figure(row["samples_per_s"], "{:.0f}") or row["note"],
        _figure(row["fraction_of_ideal"], "{:.3f}"),
        f"{low:.3f} to {high:.3f}" if low is not None else "",
        _figure(row["speedup_over_ddp"], "{:.2f}"),
        *(_figure(row[key], "{:.3f}") for key in ("measured_step_s", "predicted_step_s", "planning_s")),
        _figure(row["loss_apart"], "{:.0e}"),
    ]


def _drift(figures: dict[str, Any]) -> str:
    drift_line(figures).savefig(FOLDER / "drift.png", dpi=150)
    back = figures["recovered_at"]
    said = "never" if back is None else f"at step {back}, {back - figures['dropped_at']} steps later"
    return f"""## 2. A worker that slows down

Made by `python -m bench.drift --keep`. Two workers of full speed; the quota of the second is rewritten to 0.3 of a processor while they train (float64).
It dropped at step {figures["dropped_at"]} and the throughput was back at 0.9 of the new ideal {said} (the median of five steps from there on). The
ideals are measured as above, with both sets of quotas. Losses differ from those of a run without the drop by {figures["loss_apart"]:.1e} at the most.

![Samples a second of every step](heterogeneous/drift.png)

"""


def _memory(rows: Rows) -> str:
    body: list[Sequence[str]] = [
        [
            row["case"],
            str(row["stage"]),
            " / ".join(str(max(sizes, default=0)) for sizes in row["micro"]),
            " / ".join(f"{share:.2f}" for share in row["shares"]),
            " / ".join(f"{room / 2**20:.0f}" for room in row["room_bytes"]),
            f"{row['samples_per_s']:.0f}",
            f"{row['fraction_of_ideal']:.2f}",
        ]
        for row in rows
        if not row["died"]
    ]
    body += [[row["case"], row["died"], *[""] * 5] for row in rows if row["died"]]
    headings = ["case", "stage", "largest micro-batch", "shares", "room [MiB]", "samples/s", "of the ideal"]
    return f"""## 3. A worker with little memory

Made by `python -m bench.uneven_memory --keep`. Two workers of equal speed, the second with less memory.

{table(headings, body)}
"""


def _gpu(figures: dict[str, Any]) -> str:
    parts = zip(figures["percent"], figures["memory"], strict=True)
    body = [
        [
            row["name"],
            str(row["global_batch"]),
            " + ".join(f"{each:.0f}" for each in row["alone"]),
            f"{row['even']:.0f}",
            f"{row['planned']:.0f}",
            f"{row['planned'] / row['ideal']:.3f}",
            f"{row['planned'] / row['even']:.2f}",
            str(row["stage"]),
            " / ".join(f"{sum(sizes)} in {len(sizes)}" for sizes in row["micro"]),
            f"{row['predicted_step_s']:.3f} / {row['measured_step_s']:.3f}",
            f"{row['planning_s']:.0f}",
            str(row["changes"]),
        ]
        for row in figures["models"]
    ]
    headings = ["model", "global batch", "alone, samples/s", "even", "planned", "of the ideal", "x even", "stage"]
    headings += ["samples in micro-steps", "step predicted / measured [s]", "planning [s]", "changes"]
    return f"""## 4. Three parts of one GPU

Made by `python -m bench.planned_gpu docs/measurements/heterogeneous/gpu.json` on an NVIDIA H200 under CUDA MPS: three processes with
{", ".join(f"{percent} % and {memory}B" for percent, memory in parts)}. *Alone*: the three side by side, none exchanging anything, each at the better of two batch
sizes; their sum is the ideal. *Even*: the same engine with equal batches, in micro-batches that fit the smallest part.
*Changes*: how often batches followed what steps really took; predicted is a step of the plan in force at the end. Medians of rounds: {figures["rounds"]}.

{table(headings, body)}
"""


def _predictions(figures: dict[str, Any]) -> str:
    """Return every predicted step next to the measured one."""
    pairs = {
        f"speeds {row['speeds']}": row.get("steps_s") or [[row["predicted_step_s"], row["measured_step_s"]]]
        for row in figures[SPEEDS] or []
        if row["predicted_step_s"]
    }
    pairs |= {
        row["case"]: [[row["predicted_step_s"], row["measured_step_s"]]]
        for row in figures[MEMORY] or []
        if not row["died"]
    }
    if figures[DRIFT]:
        plan, rates = figures[DRIFT]["plan"], figures[DRIFT]["samples_per_s"][-_STEADY:]
        pairs["a worker that slows down"] = [[plan["step_s"], plan["global_batch"] / statistics.median(rates)]]
    if figures[GPU]:
        pairs |= {row["name"]: [[row["predicted_step_s"], row["measured_step_s"]]] for row in figures[GPU]["models"]}
    errors = [abs(predicted / measured - 1) for steps in pairs.values() for predicted, measured in steps]
    if not errors:
        return ""
    body = [
        [name, ", ".join(f"{predicted:.3f} / {measured:.3f}" for predicted, measured in steps)]
        for name, steps in pairs.items()
    ]
    return f"""## 5. Predicted and measured

Steps in seconds, predicted / measured, of every run above with a plan (one pair for several rounds: their medians): what the plan in force at the end said, and what its steady steps took. The
median error is {100 * statistics.median(errors):.1f} %, the largest {100 * max(errors):.1f} %, over {len(errors)} runs.

{table(["run", "predicted / measured"], body)}
"""


def _planning(figures: dict[str, Any]) -> str:
    """Return the time that measuring and planning take, as a share of a run."""
    took = {f"speeds {row['speeds']}": row["planning_s"] for row in figures[SPEEDS] or [] if row["planning_s"]}
    took |= {row["case"]: row["planning_s"] for row in figures[MEMORY] or [] if not row["died"]}
    took |= {row["name"]: row["planning_s"] for row in (figures[GPU] or {"models": []})["models"]}
    body = [[name, f"{each:.0f}", f"{each / _HOUR_S:.1%}", f"{each / _SHARE / 60:.0f}"] for name, each in took.items()]
    return f"""## 6. What planning takes

Measuring every rank and its collectives with an empty cache, and planning: seconds before the first step of the runs above, and, worked out from them, the share of a run
of an hour and how long a run is of which it is {_SHARE:.0%}. The runs above last only until their speed is known: shares of them would say nothing.

{table(["run", "planning [s]", "of an hour", f"{_SHARE:.0%} of a run of [min]"], body)}
"""


def _load(name: str) -> Any:
    path = FOLDER / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def _figure(value: float | None, form: str) -> str:
    return "" if value is None else form.format(value)
