"""What reporting costs a training step: one job with reports and without, in turns of some hundred steps."""

import json
import statistics
from typing import Any

from bench.markdown import table
from bench.monitoring.house import serving


def measured(turns: int) -> dict[str, Any]:
    """Mean seconds of a step in each turn, with reports and without, and their ratios."""
    with serving() as house:
        out = house.data.parent / "found.json"
        number = house.submit("in_turns.py", str(out), str(turns))
        job = house.until(number, lambda job: job.ended_at is not None, 120 + 20 * turns)
        assert job.state == "done", job.reason
        found: dict[str, Any] = json.loads(out.read_text())
    ratios = [one / other for one, other in zip(found["with"], found["without"], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        **{name: [round(each, 7) for each in found[name]] for name in ("with", "without")},
        "ratio": middle,
        "quartiles": [low, high],
        "report_s": statistics.median(found["report_s"]),
        "reports": len(found["report_s"]),
    }


def section(found: dict[str, Any]) -> str:
    """For the page."""
    low, high = found["quartiles"]
    row = [
        f"{1e3 * statistics.median(found['with']):.3f}",
        f"{1e3 * statistics.median(found['without']):.3f}",
        f"{found['ratio']:.4f}",
        f"{low:.4f} to {high:.4f}",
        f"{1e3 * found['report_s']:.2f}",
    ]
    headings = ["step with reports [ms]", "without [ms]", "ratio", "half of the ratios lie in", "one report [ms]"]
    return f"""## What it costs
`python -m bench.monitoring cost`

A job of two ranks under a real server, all on this machine: {len(found["with"])} turns of 400 steps with a report every
second and as many without, in the order with, without, without, with. Times are means over whole turns, so that the steps in which a
report falls count; the ratio is the median over pairs of turns. The last column is the processor time of one report in its
worker, by the thread's own clock: a report a second can take no more than that of each second.

{table(headings, [row])}
Wanted is 1.005. Here the server has no processor of its own: what it does with reports, and it thins and writes history, is taken from the two ranks."""
