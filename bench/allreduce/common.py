"""What the parts share: where figures are stored, how the command is run."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.markdown import MEASUREMENTS

FOLDER = MEASUREMENTS / "allreduce"
MIMATRIX = [sys.executable, "-m", "mimatrix.cli.main"]
Rows = list[dict[str, Any]]


def command(*words: str, timeout_s: float = 900) -> str:
    """Run `mimatrix WORDS` and return its standard output."""
    done = subprocess.run([*MIMATRIX, *words], capture_output=True, text=True, timeout=timeout_s)
    if done.returncode:
        raise SystemExit(f"mimatrix {' '.join(words)}: {done.stderr[-2000:]}")
    return done.stdout


def keep(name: str, value: object) -> None:
    """Store the figures of one part, for the page."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{name}.json").write_text(json.dumps(value, indent=1) + "\n")


def load_figures(name: str) -> Any:
    """Return the stored figures of a part, or None."""
    path = FOLDER / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def figure_path(name: str) -> Path:
    """Return the path of a picture."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    return FOLDER / name


def pick(rows: Rows, **wanted: object) -> dict[str, Any] | None:
    """Return the row with these values, or None."""
    return next((row for row in rows if all(row[key] == value for key, value in wanted.items())), None)
