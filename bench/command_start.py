"""How long the command and the messages of the job server take to load: writes docs/measurements/command_start.md."""

import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median, quantiles

from bench.markdown import machine, table, write_page

REPEATS = 25
WAYS = {
    "`mimatrix --help`": [str(Path(sys.executable).parent / "mimatrix"), "--help"],
    "`mimatrix simulate --help`": [str(Path(sys.executable).parent / "mimatrix"), "simulate", "--help"],
    "`import mimatrix.api.models`": [sys.executable, "-c", "import mimatrix.api.models"],
    "`import mimatrix.api.client`": [sys.executable, "-c", "import mimatrix.api.client"],
    "`python -c pass`, for comparison": [sys.executable, "-c", "pass"],
}


def seconds(command: list[str]) -> float:
    """Return the wall-clock time of one process from start to end."""
    started = time.perf_counter()
    # Without a timeout: with one, Python polls every 50 ms for the end of the process.
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - started


def main() -> None:
    """Interleave the commands, so that a busy moment hits all of them alike, and write the page."""
    found: dict[str, list[float]] = {label: [] for label in WAYS}
    load = os.getloadavg()[0]
    for _ in range(REPEATS):
        for label, command in WAYS.items():
            found[label].append(seconds(command))
    rows = []
    for label, times in found.items():
        low, _, high = quantiles(times, n=4)
        middle = f"{low:.3f}-{high:.3f}"
        rows.append([label, f"**{median(times):.3f}**", f"{min(times):.3f}", middle, f"{max(times):.3f}"])
        print(f"{label}: {median(times):.3f} s", flush=True)
    write_page(
        "command_start.md",
        f"""# How long the command takes to start

Made by `make bench` ({machine()}).
{REPEATS} runs of each, interleaved; the load average was {load:.1f} before. Every figure is of a whole process, with the start
and the end of Python.

{table(["", "median [s]", "least [s]", "middle half [s]", "most [s]"], rows)}
The aims are 0.5 s for the command and 0.15 s for the messages of the job server, `mimatrix.api.models`, which every
worker and every client loads. Neither loads NumPy, SciPy, matplotlib or torch; `tests/test_layers.py` checks it. Most of
the time of the messages is Pydantic, which also looks for its plugins in all installed packages;
`python -X importtime -c "import mimatrix.api.models"` shows where it goes.
""",
    )


if __name__ == "__main__":
    main()
