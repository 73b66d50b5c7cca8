"""Whether a rank is named as slow although none is: even ranks for an hour."""

import time
from collections.abc import Iterable
from typing import Any, TextIO

from support.workers import process_of

from bench.monitoring.server_process import run_server
from mimatrix.api.models import EventKind, Ranks
from mimatrix.launch.throttle.cpu_quota import quotas
from mimatrix.monitor.rank_metrics import RankFigures
from mimatrix.monitor.stragglers import StragglerTracker

SPEED = 0.3


def measure(seconds: float, record: TextIO | None = None) -> dict[str, Any]:
    """Return how often a rank was named, and how even the two were; reports go to `record`, a line per second."""
    with run_server() as server, quotas({0: SPEED, 1: SPEED}) as groups:
        number = server.submit("even.py")
        server.wait_until(number, lambda job: job.progress.step > 50, 120)
        for rank in (0, 1):
            groups[rank].write_text(str(process_of(server.address, number, rank)))
        started, named, looks = time.monotonic(), 0, 0
        largest = 1.0
        with server.client() as client:
            first = client.job(number).progress.step
            while time.monotonic() - started < seconds:
                time.sleep(1.0)
                now = client.ranks(number)
                if record:
                    record.write(now.model_dump_json() + "\n")
                looks += 1
                named += bool(now.stragglers)
                busy = [each.compute_s + each.data_s for each in now.ranks]
                if len(busy) == 2 and min(busy) > 0:
                    largest = max(largest, max(busy) / min(busy))
                if looks % 60 == 0:
                    print(f"{looks} s, step {client.job(number).progress.step}, named {named}", flush=True)
            steps = client.job(number).progress.step - first
            named_by = (EventKind.STRAGGLER, EventKind.HANG)
            sentences = [each.reason for each in client.events(number) if each.kind in named_by]
    return {
        "seconds": round(time.monotonic() - started),
        "steps": steps,
        "looks": looks,
        "looks_with_a_name": named,
        "sentences": sentences,
        "largest_ratio": round(largest, 3),
    }


def replay_record(record: Iterable[str]) -> list[str]:
    """Return which ranks the rules of today would name, from recorded reports."""
    tracker, sentences = StragglerTracker(), list[str]()
    for second, line in enumerate(record):
        figures = [
            RankFigures(
                rank=each.rank,
                device=each.device,
                at_s=each.at.timestamp(),
                step=each.step,
                step_s=each.step_s,
                compute_s=each.compute_s,
                data_s=each.data_s,
                waiting_s=each.waiting_s,
                communication_s=each.communication_s,
            )
            for each in Ranks.model_validate_json(line).ranks
        ]
        straggler = tracker.observe(float(second), figures)
        sentences += [straggler.describe()] if straggler else []
    return sentences


def section(figures: dict[str, Any]) -> str:
    """Return this part of the page."""
    said = "".join(f"\n- {sentence}" for sentence in figures["sentences"])
    return f"""## False alarms
`python -m bench.monitoring false_alarms`

Two ranks of {SPEED:g} processors each with the same work, for {figures["seconds"] / 60:.0f} minutes ({figures["steps"]:,} steps), looked at every second:
a rank was named **{len(figures["sentences"])}** times ({figures["looks_with_a_name"]} of {figures["looks"]:,} looks). The longest that one rank
took in a report, of the time of the other, was {figures["largest_ratio"]:.2f} times as long.{figures.get("remark", "")}{said}
"""
