"""`python -m bench.hybrid [--seeds 20] [--keep]`: writes docs/measurements/hybrid.md."""

import json
from typing import Annotated

import typer

from bench.hybrid import accuracy
from bench.markdown import MEASUREMENTS, machine, write_page


def main(
    seeds: Annotated[int, typer.Option(help="Pairs of runs.")] = 20,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the figures and write the page.")] = False,
) -> None:
    """Measure accuracy."""
    found = accuracy.measured(seeds)
    if keep:
        (MEASUREMENTS / "hybrid.json").write_text(json.dumps(found, indent=1) + "\n")
        write_page("hybrid.md", f"# Groups that do not wait\n\nMeasured on {machine()}.\n\n{accuracy.section(found)}")


if __name__ == "__main__":
    typer.run(main)
