"""What reporting costs a training step: one job with reports and without, in turns of several hundred steps."""

import json
import math
import statistics
from itertools import pairwise
from typing import Any

from bench.markdown import table
from bench.monitoring.server_process import run_server

_AFTER_S = 0.02
"""How long after its end a report may still be felt: caches have to be filled again."""
_HALF_S = 0.5
"""Of the time between reports; the ranks of a job report at the same moment."""


def measure(turns: int) -> dict[str, Any]:
    """Return the mean seconds of a step in each turn, with reports and without, and how much longer those with reports take."""
    with run_server() as server:
        out = server.data.parent / "found"
        number = server.submit("in_turns.py", str(out), str(turns))
        job = server.wait_until(number, lambda job: job.ended_at is not None, 120 + 20 * turns)
        assert job.state == "done", job.reason
        first, second = (json.loads(out.with_suffix(f".{rank}").read_text()) for rank in (0, 1))
    reports = [*first["reports"], *second["reports"]]
    means = {name: [(marks[-1] - marks[0]) / (len(marks) - 1) for marks in first[name]] for name in ("with", "without")}
    ratios = [one / other for one, other in zip(means["with"], means["without"], strict=True)]
    felt = [report_overhead(marks, reports) for marks in first["with"]]
    return {
        **{name: [round(each, 7) for each in means[name]] for name in means},
        "ratio": statistics.median(ratios),
        "between": _between(ratios),
        "felt": statistics.median(felt),
        "felt_between": _between(felt),
        "report_s": statistics.median(took_s for *_, took_s in reports),
        "reports": len(reports),
    }


def report_overhead(marks: list[float], reports: list[list[float]]) -> float:
    """Return how much longer a turn took because reports fell into some of its steps, as a ratio.

    A moment falls into a long step more likely than into a short one, whether it is a report's or not: so these steps
    are compared with those that the same moments, half a second later, fall into.
    """
    steps = list(pairwise(marks))

    def fallen_into(later_s: float) -> list[float]:
        times = [(began_s + later_s, ended_s + later_s + _AFTER_S) for began_s, ended_s, _ in reports]
        return [end - start for start, end in steps if any(began < end and start < over for began, over in times)]

    with_reports, without = fallen_into(0.0), fallen_into(_HALF_S)
    if not with_reports or not without:
        return 1.0
    extra_s = len(with_reports) * (statistics.mean(with_reports) - statistics.mean(without))
    took_s = marks[-1] - marks[0]
    return took_s / (took_s - extra_s)


def _between(values: list[float]) -> list[float]:
    """Return a 95 % confidence interval of the median, valid for any distribution."""
    off, middle = math.ceil(0.98 * math.sqrt(len(values))), len(values) // 2
    within = sorted(values)[max(0, middle - off) : middle + off]
    return [within[0], within[-1]]


def section(figures: dict[str, Any]) -> str:
    """Return this part of the page."""
    rows = [
        [
            f"turns with reports ({1e3 * statistics.median(figures['with']):.3f} ms a step), by turns without them "
            f"({1e3 * statistics.median(figures['without']):.3f} ms)",
            f"{figures['ratio']:.4f}",
            "{:.4f} to {:.4f}".format(*figures["between"]),
        ],
        [
            "turns with reports, by the same turns if steps with a report took as long as others",
            f"{figures['felt']:.4f}",
            "{:.4f} to {:.4f}".format(*figures["felt_between"]),
        ],
    ]
    return f"""## What it costs
`python -m bench.monitoring cost`

A job of two ranks under a real server, all on this machine: {len(figures["with"])} turns of 200 steps with a report every
second and as many without, in the order with, without, without, with. Both ratios are medians over turns; the median of all turns that there could be lies within the limits with 95 %.
The first is of whole turns, seconds apart, between which this machine changes by more than the cost. So the second asks within a turn: steps that a report of either rank fell into, or the
{1e3 * _AFTER_S:.0f} ms after it, against those that the same moments half a second later fall into (a moment falls into a long step more likely than into a short one).

{table(["", "ratio", "with 95 %"], rows)}
Wanted is 1.005. One report takes {1e3 * figures["report_s"]:.2f} ms of processor time in its worker (median of {figures["reports"]:,}, by the thread's own
clock). The server has no processor of its own here: the time in which it takes a report is taken from the ranks, and is in the figures."""
