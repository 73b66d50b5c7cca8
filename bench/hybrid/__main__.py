"""`python -m bench.hybrid accuracy|stalls|page [--keep]`: figures are stored, and docs/measurements/hybrid.md is written.

Two sites are measured by `python -m bench.hybrid.sites`, what `mode="auto"` chooses by `python -m bench.hybrid.auto_mode`.
"""

import json
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated, Any

import typer

from bench.hybrid import accuracy, auto_mode, sites, stalls
from bench.markdown import MEASUREMENTS, machine, write_page

_KEPT = MEASUREMENTS / "hybrid"
_PARTS: dict[str, Callable[[dict[str, Any]], str]] = {
    "accuracy": accuracy.section,
    "stalls": stalls.section,
    "sites": sites.section,
    "choosing": auto_mode.section,
}


class Measurement(StrEnum):
    """The measurements of this command."""

    ACCURACY = "accuracy"
    STALLS = "stalls"
    PAGE = "page"


def main(
    what: Annotated[Measurement, typer.Argument(help="To measure, or only to write the page.")],
    rounds: Annotated[int, typer.Option(help="Of stalls.")] = 6,
    seeds: Annotated[int, typer.Option(help="Of accuracy: pairs of runs.")] = 20,
    first: Annotated[int, typer.Option(help="Of accuracy: the first seed; others are for trying out.")] = 0,
    ways: Annotated[str, typer.Option(help="Of accuracy: parts of their names, by comma.")] = "",
    keep: Annotated[bool, typer.Option("--keep", help="Keep the figures and write the page.")] = False,
) -> None:
    """Measure one thing, or only write the page."""
    if what is not Measurement.PAGE:
        chosen = tuple(way for way in accuracy.WAYS if any(part in way for part in ways.split(",")))
        figures = stalls.measure(rounds) if what is Measurement.STALLS else accuracy.measure(seeds, first, chosen)
        print(json.dumps(figures, indent=1))
        if keep:
            _KEPT.mkdir(parents=True, exist_ok=True)
            (_KEPT / f"{what}.json").write_text(json.dumps(figures, indent=1) + "\n")
    if keep or what is Measurement.PAGE:
        write()


def write() -> None:
    """Write the page from the stored figures."""
    parts = [part(json.loads(file.read_text())) for name, part in _PARTS.items() if (file := _file(name)).is_file()]
    text = "\n".join(part.rstrip() + "\n" for part in parts)
    write_page("hybrid.md", f"# Groups that do not wait\n\nMeasured on {machine()}.\n\n{text}")


def _file(name: str) -> Any:
    return _KEPT / f"{name}.json"


if __name__ == "__main__":
    typer.run(main)
