"""How long the command takes to start: writes docs/measurements/command_start.md."""

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
    "`python -c pass`, for comparison": [sys.executable, "-c", "pass"],
}


def seconds(command: list[str]) -> float:
    """Return the wall-clock time of one process from start to end."""
    started = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=30)
    return time.perf_counter() - started


def main() -> None:
    """Interleave the commands, so that a busy moment hits all of them alike, and write the page."""
    found: dict[str, list[float]] = {label: [] for label in WAYS}
    for _ in range(REPEATS):
        for label, command in WAYS.items():
            found[label].append(seconds(command))
    rows = []
    for label, times in found.items():
        low, _, high = quantiles(times, n=4)
        rows.append([label, f"**{median(times):.3f}**", f"{low:.3f}-{high:.3f}", f"{max(times):.3f}"])
        print(f"{label}: {median(times):.3f} s", flush=True)
    write_page(
        "command_start.md",
        f"""# How long the command takes to start

Made by `make bench` ({machine()}): {REPEATS} runs of each, interleaved.

{table(["", "median [s]", "middle half [s]", "most [s]"], rows)}
The aim is half a second. What keeps it there is that the entry imports neither NumPy, SciPy, matplotlib nor torch;
`tests/test_layers.py` checks it.
""",
    )


if __name__ == "__main__":
    main()
