"""`python -m bench.monitoring cost|detection_latency|false_alarms|scale|page [--keep]`: measure, and write docs/measurements/monitoring.md."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from bench import scale
from bench.markdown import MEASUREMENTS, machine, write_page
from bench.monitoring import cost, detection_latency, false_alarms

_KEPT = MEASUREMENTS / "monitoring"
_PARTS = {
    "cost": cost.section,
    "detection_latency": detection_latency.section,
    "false_alarms": false_alarms.section,
    "scale": scale.section,
}
_FILES = {"detection_latency": "naming", "false_alarms": "calm"}
"""Records keep the names that they were first stored under."""


def main(
    what: Annotated[str, typer.Argument(help="cost, detection_latency, false_alarms, scale or page.")],
    turns: Annotated[int, typer.Option(help="Of cost: turns with reports, and as many without.")] = 60,
    rounds: Annotated[int, typer.Option(help="Of detection_latency.")] = 10,
    seconds: Annotated[float, typer.Option(help="Of false_alarms.")] = 3600.0,
    record: Annotated[
        typer.FileTextWrite | None, typer.Option(help="Of false_alarms: where to write what was seen.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the figures and write the page.")] = False,
) -> None:
    """Measure one thing, or only write the page."""
    measures: dict[str, Callable[[], dict[str, Any]]] = {
        "cost": lambda: cost.measure(turns),
        "detection_latency": lambda: detection_latency.measure(rounds),
        "false_alarms": lambda: false_alarms.measure(seconds, record),
        "scale": lambda: scale.measure(scale.HistorySize(), 90.0, True),
    }
    if what != "page":
        figures = measures[what]()
        print(json.dumps(figures, indent=1))
        if keep:
            _KEPT.mkdir(parents=True, exist_ok=True)
            _file(what).write_text(json.dumps(figures, indent=1) + "\n")
    if keep or what == "page":
        write()


def write() -> None:
    """Write the page from the stored figures."""
    parts = [
        section(json.loads(path.read_text())) for name, section in _PARTS.items() if (path := _file(name)).is_file()
    ]
    text = "\n".join(part.rstrip() + "\n" for part in parts)
    write_page("monitoring.md", f"# Monitoring\n\nMeasured on {machine()}.\n\n{text}")


def _file(name: str) -> Path:
    return _KEPT / f"{_FILES.get(name, name)}.json"


if __name__ == "__main__":
    typer.run(main)
