"""Tables and pages of docs/measurements, written by the benchmarks themselves."""

import os
import platform
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy
import scipy

ROOT = Path(__file__).resolve().parent.parent
MEASUREMENTS = ROOT / "docs" / "measurements"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table; the first column is text, the others are figures."""
    rule = [":--", *["--:"] * (len(headings) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in (headings, rule, *rows)) + "\n"


def machine() -> str:
    """Describe this machine in a line."""
    return (
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
        f"NumPy {numpy.__version__}, SciPy {scipy.__version__}"
    )


def write_page(name: str, text: str) -> None:
    """Replace docs/measurements/NAME."""
    MEASUREMENTS.mkdir(parents=True, exist_ok=True)
    (MEASUREMENTS / name).write_text(text, encoding="utf-8")
    print(f"wrote docs/measurements/{name}")
