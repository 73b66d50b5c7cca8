"""A thousand jobs, 500 devices, a week of history: how fast the server answers, how soon pages can be used, what it weighs.

`python -m bench.scale [--keep]` fills a database as a week of use leaves it (`bench/server/synthetic_history.py`) and starts the real
server on it. The devices are not real: a launcher that only says that its teams run stands in for them, and connections
that send what workers send report for the jobs that run.
"""

import asyncio
import json
import os
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from support.chromium import CHROMIUM

from bench.markdown import MEASUREMENTS, machine, table
from bench.server import dashboard_load, load, page_load, synthetic_history
from bench.server.synthetic_history import HistorySize
from mimatrix.api.models import Report
from mimatrix.server.db.engine import DATABASE_FILE
from mimatrix.server.metrics.live_state import Live

_FIGURES = MEASUREMENTS / "monitoring" / "scale.json"
_POINT_BYTES = 1_062
"""A point of a job of eight ranks in SQLite, as docs/monitoring.md has it: 119 MB for 112,000."""
_LOADS = 7
__all__ = ["HistorySize", "measure", "section"]


def main(
    jobs: Annotated[int, typer.Option(help="In all states.")] = 1000,
    devices: Annotated[int, typer.Option(help="On nodes of eight.")] = 500,
    seconds: Annotated[float, typer.Option(help="How long ten dashboards look.")] = 90.0,
    is_browsed: Annotated[bool, typer.Option("--browser/--no-browser", help="Open pages in Chromium.")] = True,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the figures in docs/measurements/monitoring.")] = False,
) -> None:
    """Measure the server and its dashboard with a large state."""
    figures = measure(HistorySize(jobs, devices), seconds, is_browsed and CHROMIUM is not None)
    print(json.dumps(figures, indent=1))
    print(section(figures))
    if keep:
        _FIGURES.parent.mkdir(parents=True, exist_ok=True)
        _FIGURES.write_text(json.dumps(figures, indent=1) + "\n")


def measure(size: HistorySize, seconds: float, is_browsed: bool) -> dict[str, Any]:
    """Fill a database, serve it to dashboards and workers, and return the figures."""
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="mimatrix-scale-") as folder:
        data = Path(folder) / "data"
        lives = synthetic_history.fill(data, size, time.time())
        figures: dict[str, Any] = {"jobs": size.jobs, "devices": size.devices, "running": size.running}
        figures |= {"machine": machine(), "load_before": before, "nice": os.nice(0)}
        figures["database"] = weigh_database(data / DATABASE_FILE)
        with _run_server(Path(folder), size) as port, _run_workers(Path(folder), port, lives) as reports:
            token = (data / "token").read_text().strip()
            asked = dashboard_load.RequestStats()
            asyncio.run(dashboard_load.open_dashboards(port, token, lives, seconds, asked))
            assert not asked.refused, asked.refused[:3]
            figures["seconds"] = seconds
            figures["answers"] = {route: _spread(each, asked.sizes[route]) for route, each in asked.seconds.items()}
            figures["answers"]["all"] = _spread([each for row in asked.seconds.values() for each in row], 0)
            if is_browsed:
                lasting = next(each.number for each in lives if each.started_s and not each.ended_s)
                figures["pages"] = page_load.measure(f"http://127.0.0.1:{port}", token, lasting, _LOADS)
        figures["reports"] = {**_spread(reports.seconds, 0), "lost": reports.failed}
    return figures


def weigh_database(file: Path) -> dict[str, Any]:
    """Return the bytes of a closed database, by table with its indices."""
    connection = sqlite3.connect(file)
    owners = dict(connection.execute("SELECT name, tbl_name FROM sqlite_schema"))
    by_table: dict[str, int] = {}
    for name, weight in connection.execute("SELECT name, sum(pgsize) FROM dbstat GROUP BY name"):
        owner = owners.get(name, name)
        by_table[owner] = by_table.get(owner, 0) + weight
    (points,) = connection.execute("SELECT count(*) FROM samples").fetchone()
    connection.close()
    return {
        "bytes": file.stat().st_size,
        "by_table": dict(sorted(by_table.items(), key=lambda each: -each[1])),
        "points": points,
        "documented_bytes": points * _POINT_BYTES,
    }


@contextmanager
def _run_server(folder: Path, size: HistorySize) -> Iterator[int]:
    """Run the real server as a process."""
    port, data = load.free_port(), folder / "data"
    (folder / "tokens").mkdir()
    words = [
        sys.executable,
        "-m",
        "bench.server.synthetic_history",
        "host",
        str(data),
        str(port),
        str(size.jobs),
        str(size.devices),
    ]
    environment = {**os.environ, "LOAD_TOKENS": str(folder / "tokens")}
    process = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL)
    try:
        _wait(lambda: len(list((folder / "tokens").iterdir())) == size.running and (data / "address").is_file())
        yield port
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)


@contextmanager
def _run_workers(
    folder: Path, port: int, lives: Sequence[synthetic_history.SyntheticJob]
) -> Iterator[load.WorkerStats]:
    """Report for all jobs that run, from a thread."""
    seen, over = load.WorkerStats(), threading.Event()
    running = [each for each in lives if each.started_s and each.ended_s is None]
    secrets = [(folder / "tokens" / f"job-{each.number}.1").read_text() for each in running]

    every_s = _every_s(len(running) * synthetic_history.RANKS)

    async def report() -> None:
        working = [
            asyncio.create_task(
                load.worker(port, life.number, rank, secret, every_s, float("inf"), seen, life.step_at(time.time()))
            )
            for life, secret in zip(running, secrets, strict=True)
            for rank in range(synthetic_history.RANKS)
        ]
        await asyncio.to_thread(over.wait)
        for each in working:
            each.cancel()
        await asyncio.gather(*working, return_exceptions=True)

    thread = threading.Thread(target=lambda: asyncio.run(report()))
    thread.start()
    try:
        _wait(lambda: len(seen.seconds) >= len(running) * synthetic_history.RANKS)
        yield seen
    finally:
        over.set()
        thread.join(timeout=30)


def _every_s(workers: int) -> float:
    """Return the report interval that the server gives to this number of workers."""
    live = Live()
    live.begin(1, 1, [""] * workers)
    for job in live.all().values():
        for rank in range(workers):
            job.record_report(rank, Report.model_validate(load.report_of(rank, 1)), 0.0)
    return live.report_interval_s()


def _wait(is_so: Any) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline, "the server or its workers did not come up"
        time.sleep(0.1)


def _spread(seconds: Sequence[float], size: int) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "count": len(ordered),
        "p50_ms": 1e3 * statistics.median(ordered),
        "p99_ms": 1e3 * ordered[int(0.99 * len(ordered))],
        "worst_ms": 1e3 * ordered[-1],
        "bytes": size,
    }


def section(figures: dict[str, Any]) -> str:
    """Return this part of docs/measurements/monitoring.md."""
    answers, database = figures["answers"], figures["database"]
    return f"""## A thousand jobs

`python -m bench.scale --keep` fills a database as a week of use leaves it: {figures["jobs"]:,} jobs, {figures["running"]} of which run on
{figures["running"] * synthetic_history.RANKS} of {figures["devices"]} devices, and {database["points"]:,} points in the three tiers. The server is real; the devices are not, so a
launcher that only says that its teams run stands in for them, and {figures["running"] * synthetic_history.RANKS} connections report every {_every_s(figures["running"] * synthetic_history.RANKS):.0f} s as workers would.
All of it, browser included, shares the cores of one machine: {figures["machine"]}. Others used it, too: before
it began, the load average was {figures["load_before"]:.1f}; it ran at nice {figures["nice"]}.

### Answers

Ten dashboards look for {figures["seconds"]:.0f} s, five at all jobs, four at a job, one at the cluster, each asking as its page does; in addition a
Prometheus, and a client that asks for something large every other second. Of {answers["all"]["count"]:,} requests p99 is **{answers["all"]["p99_ms"]:.0f} ms**; of {figures["reports"]["count"]:,} reports, none of which may be
lost ({figures["reports"]["lost"]} were), {figures["reports"]["p99_ms"]:.0f} ms.

{table(["route", "requests", "p50 [ms]", "p99 [ms]", "worst [ms]", "largest [kB]"], _answer_rows(answers))}
{_pages(figures["pages"]) if "pages" in figures else ""}### What it weighs

{database["bytes"] / 1e6:,.0f} MB. By [what is kept](../monitoring.md), {_POINT_BYTES:,} bytes a point, figures alone should be {database["documented_bytes"] / 1e6:,.0f} MB.

{table(["table, with its indices", "MB", "part"], _weight_rows(database))}"""


def _answer_rows(answers: dict[str, Any]) -> list[list[str]]:
    rows = sorted(answers.items(), key=lambda each: (each[0] == "all", each[0]))
    return [
        [route, f"{row['count']:,}", *(f"{row[name]:.1f}" for name in ("p50_ms", "p99_ms", "worst_ms")), _size(row)]
        for route, row in rows
    ]


def _size(row: dict[str, Any]) -> str:
    return f"{row['bytes'] / 1e3:,.1f}" if row["bytes"] else ""


def _pages(pages: dict[str, Any]) -> str:
    rows = [
        [
            name,
            f"{row['cold_ms']:.0f}",
            f"**{row['ready_ms']:.0f}**",
            f"{row['slowest_ms']:.0f}",
            f"{row['longest_task_ms']:.0f}" if row["longest_task_ms"] else "below 50",
            f"{row['answers_ms']:.0f}" if row["answers_ms"] else "below 16" if name == "overview" else "",
        ]
        for name, row in pages.items()
    ]
    headings = ["page", "first visit", f"median of {_LOADS}", "slowest", "longest task", "a key until it is painted"]
    return f"""### Pages

Chromium without a window, from the navigation until rows, devices or curves are painted and the page takes the next event, in ms; then,
in the overview, keys typed into the filter.

{table(headings, rows)}
"""


def _weight_rows(database: dict[str, Any]) -> list[list[str]]:
    return [
        [name, f"{weight / 1e6:.2f}", f"{weight / database['bytes']:.1%}"]
        for name, weight in database["by_table"].items()
        if weight > 100_000
    ]


if __name__ == "__main__":
    typer.run(main)
