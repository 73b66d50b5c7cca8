"""Write the generated pages and pictures: `make docs`."""

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

import mimatrix
from mimatrix.core import environment

DOCS = Path(__file__).resolve().parent
PICTURES = DOCS / "pictures"
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
    """Return what `mimatrix WORDS` prints on a plain terminal of 100 columns."""
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


def command_names() -> list[str]:
    """Return the name of every command, in the order in which the help lists them: `run`, `lab`, `lab up`."""
    from mimatrix.cli.main import app

    return list(_walk(get_command(app), ()))


def _walk(command: Any, path: tuple[str, ...]) -> Iterator[str]:
    if path:
        yield " ".join(path)
    for name, inner in getattr(command, "commands", {}).items():
        yield from _walk(inner, (*path, name))


def command_page() -> str:
    """Return the page of the command: the help of each subcommand."""
    parts = [
        f"## mimatrix {name}\n\n```\n{command(*name.split(), '--help').strip()}\n```\n" for name in command_names()
    ]
    return "# The command\n\nMade by `make docs` from the command's own help.\n\n" + "\n".join(parts)


def environment_page() -> str:
    """Return the page of environment variables, from the list that the code reads them by."""
    own: list[str] = []
    launchers: list[str] = []
    for variable in environment.variables():
        example = f"`{variable.example}`" if variable.example else ""
        row = f"| `{variable.name}` | {variable.set_by} | {variable.meaning} | {example} |"
        (own if variable.set_by.startswith("you") else launchers).append(row)
    head = "| name | set by | meaning | example |\n|---|---|---|---|\n"
    return (
        "# Environment variables\n\nMade by `make docs` from [core/environment.py](../mimatrix/core/environment.py), "
        "the only module that spells these names.\n\n"
        "Workers also have the variables of torchrun (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR`, "
        "`MASTER_PORT`, ...), which every launcher sets.\n\n"
        "## To set yourself\n\nAll are optional. Some commands set them for the workers that they start.\n\n"
        + head
        + "\n".join(own)
        + "\n\n## Set by launchers\n\nScripts may read them. Do not set them yourself.\n\n"
        + head
        + "\n".join(launchers)
        + "\n"
    )


INTERNAL = {"restore", "needs_metric", "catch_up", "is_bypassed", "flush_log"}
"""Public names of the documented classes that only the engine uses."""


def reference_page() -> str:
    """Return the reference of what a training script calls, from its docstrings."""
    parts = [
        "# Reference\n\nMade by `make docs` from the docstrings. What happens for each shape of a loop is in "
        "[training](training.md).\n",
        _entry("mimatrix.init", mimatrix.init, level=2),
    ]
    for name in ("Run", "MicroBatchLoader", "PreparedOptimizer", "SyncedLRScheduler", "WeightAverage"):
        owner = getattr(mimatrix, name)
        parts.append(f"## {name}\n\n{_render(inspect.getdoc(owner) or '')}")
        parts += [
            _entry(f"{name.lower() if name == 'Run' else name}.{key}", value, level=3)
            for key, value in _members(owner).items()
            if not key.startswith("_") and key not in INTERNAL and (callable(value) or isinstance(value, property))
        ]
    return "\n".join(parts)


def _members(owner: type) -> dict[str, Any]:
    """Return what a class and its bases here define, in the order in which it is read."""
    return {
        key: value
        for base in owner.__mro__
        if base.__module__.startswith("mimatrix")
        for key, value in vars(base).items()
    }


def _entry(name: str, value: Any, level: int) -> str:
    text = _render(inspect.getdoc(value) or "")
    if isinstance(value, property):
        return f"{'#' * level} `{name}`\n\n{text}"
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for key, parameter in inspect.signature(value).parameters.items()
        if key != "self"
    ]
    signature = str(inspect.Signature(parameters)).replace("<", "").replace(">", "")
    return f"{'#' * level} `{name}{signature}`\n\n{text}"


def _render(docstring: str) -> str:
    """Return a docstring as Markdown: its sections as bold words, its arguments as a list."""
    lines: list[str] = []
    section = ""
    for line in docstring.splitlines():
        if re.fullmatch(r"(Args|Returns|Raises|Example|Attributes):", line):
            section = line[:-1]
            lines.append(f"**{section}**\n" if section != "Example" else "**Example**\n\n```python")
        elif section and not line.strip():
            lines.append("```\n" if section == "Example" else "")
            section = ""
        elif section in ("Args", "Raises", "Attributes") and re.match(r"    \S", line):
            key, _, meaning = line.strip().partition(": ")
            lines.append(f"- `{key}`: {meaning}")
        elif section == "Example":
            lines.append(line.strip().removeprefix(">>> ").removeprefix("... "))
        else:
            lines.append(f"  {line.strip()}" if section in ("Args", "Raises", "Attributes") else line.strip())
    return "\n".join([*lines, "```"] if section == "Example" else lines) + "\n"


def main() -> None:
    """Write the generated pages, then draw the pictures."""
    (DOCS / "command.md").write_text(command_page(), encoding="utf-8")
    (DOCS / "environment.md").write_text(environment_page(), encoding="utf-8")
    (DOCS / "reference.md").write_text(reference_page(), encoding="utf-8")
    PICTURES.mkdir(exist_ok=True)
    for name, words in DRAWN.items():
        command(*words, str(PICTURES / name))


if __name__ == "__main__":
    main()
