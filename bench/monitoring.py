"""What reporting costs a training step: the same job with reports and without, in turns of some hundred steps.

`python -m bench.monitoring [--keep]` starts a real server and a job of two ranks (`bench/scripts/monitored.py`), which
times its own steps.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.markdown import machine, table, write_page

_PORT = 7793
_SCRIPT = Path(__file__).parent / "scripts" / "monitored.py"
_FIGURES = Path("docs/measurements/monitoring.json")


def main(
    turns: Annotated[int, typer.Option(help="With and without, so many times.")] = 12,
    keep: Annotated[bool, typer.Option("--keep", help="Write the page.")] = False,
) -> None:
    """Measure what monitoring costs."""
    found = measured(turns)
    print(json.dumps(found, indent=1))
    if keep:
        _FIGURES.write_text(json.dumps(found, indent=1) + "\n")
        write(found)


def measured(turns: int) -> dict[str, Any]:
    """Median seconds of a step in each turn, with reports and without, and their ratios."""
    with tempfile.TemporaryDirectory(prefix="mimatrix-monitoring-") as folder:
        data, out = Path(folder) / "data", Path(folder) / "found.json"
        command = [sys.executable, "-m", "mimatrix.cli.main"]
        known = {**os.environ, "MIMATRIX_DATA": str(data)}
        server = subprocess.Popen([*command, "up", "--data", str(data), "--port", str(_PORT), "--devices", "2"])
        try:
            deadline = time.monotonic() + 60
            while not (data / "address").is_file():
                assert time.monotonic() < deadline, "the server did not come up"
                time.sleep(0.1)
            words = ["submit", "--devices", "2", str(_SCRIPT), "--", str(out), str(turns)]
            subprocess.run([*command, *words], env=known, check=True, timeout=60)
            subprocess.run([*command, "wait", "1"], env=known, check=True, timeout=600)
            seconds = json.loads(out.read_text())
        finally:
            server.terminate()
            server.wait(timeout=30)
    ratios = [with_s / without_s for with_s, without_s in zip(seconds["with"], seconds["without"], strict=True)]
    return {**seconds, "ratios": ratios, "ratio": statistics.median(ratios)}


def write(found: dict[str, Any]) -> None:
    """The page."""
    rows = [
        [f"{1e3 * with_s:.3f}", f"{1e3 * without_s:.3f}", f"{ratio:.4f}"]
        for with_s, without_s, ratio in zip(found["with"], found["without"], found["ratios"], strict=True)
    ]
    spread = f"{min(found['ratios']):.4f} to {max(found['ratios']):.4f}"
    write_page(
        "monitoring.md",
        f"""# Monitoring

Made by `python -m bench.monitoring --keep` on {machine()}.

## What it costs

A job of two ranks under a real server: 400 steps with a report every second, 400 without, and so on. Medians of rank 0's steps.
The median of the ratios is **{found["ratio"]:.4f}** ({spread}).

{table(["step with reports [ms]", "without [ms]", "ratio"], rows)}
""",
    )


if __name__ == "__main__":
    typer.run(main)
