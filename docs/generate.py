"""Make the generated pages and pictures anew: `make docs`."""

import os
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
PICTURES = DOCS / "pictures"
COMMANDS = (
    "demo",
    "run",
    "profile",
    "plan",
    "simulate",
    "topology",
    "algorithms",
    "bench",
    "export",
    "lab",
    "lab up",
    "lab run",
    "lab status",
    "lab down",
)
DRAWN = {
    "demo.png": ["demo", "--picture"],
    "plan.png": [
        *("plan", "--cluster", "examples/lab.toml", "--profiles", "examples/lab_profiles.json"),
        *("--global-batch", "512", "--picture"),
    ],
    "bigraph.png": ["topology", "bigraph:4x4", "--picture"],
    "lab.png": ["topology", "examples/lab.toml", "--picture"],
    "timeline.png": ["simulate", "--cluster", "leaf_spine:4x4", "--algorithm", "gdraa", "--picture"],
}


def command(*words: str) -> str:
    """What `mimatrix WORDS` prints on a plain terminal of 100 columns."""
    plain = os.environ | {"COLUMNS": "100", "TERM": "dumb", "NO_COLOR": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "mimatrix.cli.main", *words],
        env=plain,
        cwd=DOCS.parent,
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return "\n".join(line.rstrip() for line in done.stdout.splitlines())


def command_page() -> str:
    """The page of the command: what each part of it says about itself."""
    parts = [f"## mimatrix {name}\n\n```\n{command(*name.split(), '--help').strip()}\n```\n" for name in COMMANDS]
    return "# The command\n\nMade by `make docs` from the command's own help.\n\n" + "\n".join(parts)


def main() -> None:
    """The page of the command, then the pictures."""
    (DOCS / "command.md").write_text(command_page(), encoding="utf-8")
    PICTURES.mkdir(exist_ok=True)
    for name, words in DRAWN.items():
        command(*words, str(PICTURES / name))


if __name__ == "__main__":
    main()
