"""`python -m bench.server`: load and traffic of the job server; --keep writes docs/measurements/server.md."""

import json
import os
import resource
from pathlib import Path
from typing import Annotated, Any

import typer
from support import postgresql

from bench.markdown import machine, table, write_page
from bench.server import load, traffic

_FIGURES = Path("docs/measurements/server.json")


def main(
    only: Annotated[str, typer.Option(help="traffic, sqlite or postgresql; without, all.")] = "",
    workers: Annotated[int, typer.Option(help="How many are simulated.")] = 2000,
    seconds: Annotated[float, typer.Option(help="For how long.")] = 300.0,
    every: Annotated[float, typer.Option(help="Seconds between the reports of a worker.")] = 5.0,
    keep: Annotated[bool, typer.Option("--keep", help="Write the page.")] = False,
) -> None:
    """Measure the server."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)
    figures: dict[str, Any] = json.loads(_FIGURES.read_text()) if _FIGURES.is_file() else {}
    if only in ("", "traffic"):
        figures["traffic"] = traffic.measure()
    if only in ("", "sqlite"):
        figures[f"sqlite {workers}"] = load.measure(workers, seconds, every, "")
    if only in ("", "postgresql") and postgresql.is_there():
        with postgresql.running() as address:
            figures[f"postgresql {workers}"] = load.measure(workers, seconds, every, f"{address}/postgres")
    print(json.dumps(figures, indent=1))
    if keep:
        _FIGURES.write_text(json.dumps(figures, indent=1) + "\n")
        write(figures)


def write(figures: dict[str, Any]) -> None:
    """Write the page."""
    crossed = [
        [
            row["model"],
            f"{row['bytes_per_report']:.0f}",
            f"{row['bytes_per_s_and_worker']:.0f}",
            f"{row['server_memory_mb']:.0f}",
            str(row["steps"]),
        ]
        for row in figures.get("traffic", [])
    ]
    loads = [
        [
            row["database"],
            f"{row['workers']:,}",
            f"{row['seconds']:.0f}",
            f"{row['reports']:,}",
            str(row["lost"]),
            f"{row['reports_per_s']:.0f}",
            f"{row['p50_ms']:.1f}",
            f"**{row['p99_ms']:.0f}**",
            f"{row['longest_ms']:.0f}",
            f"{row['server_processors']:.2f}",
            f"{row['memory_before_mb']:.0f} / {row['memory_after_mb']:.0f}",
        ]
        for name, row in figures.items()
        if name != "traffic"
    ]
    headings = [
        "database",
        "workers",
        "seconds",
        "reports",
        "lost",
        "reports/s",
        "p50 [ms]",
        "p99 [ms]",
        "longest [ms]",
    ]
    write_page(
        "server.md",
        f"""# The job server

Made by `python -m bench.server --keep` on {machine()}.

## No model data

Two workers train a model of each size under a real server; all their connections to it go through a relay that counts bytes. What crosses
does not depend on the model, nor does the server's memory.

{table(["model", "bytes a report, both ways", "bytes/s and worker", "server's memory [MB]", "steps"], crossed)}
## Load

Simulated workers that report every few seconds, from one process on the same {os.cpu_count()} cores: each is a connection that sends what a worker sends.
The server is real; a launcher that only says that its teams run takes the place of the real one, since 2,000 processes do not fit here.
*Processors*: what the server itself used; it answers in one thread. *Memory*: of the server, before and after.

{table([*headings, "processors", "memory [MB]"], loads)}
What breaks first is the simulator: with 4,000 workers that report every 2 s some 1,200 reports come through in a second, its own processor is full
and answers wait in it for seconds, while the server uses 0.4 of a processor and nothing is lost. Where the server itself breaks cannot be reached on
this machine; the time to answer will be first, since turns of its loop hold Python's lock for some milliseconds each, in which reports pile up. More
workers were not tried: the launcher of this measurement has one node, and a node has at most 4,096 devices.
""",
    )


if __name__ == "__main__":
    typer.run(main)
