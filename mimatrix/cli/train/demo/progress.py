"""Show workers while they train: a live table on a terminal, a line every few seconds elsewhere."""

import io
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mimatrix.cli.train.demo.display import Board, Lane, TrainingPhase

if TYPE_CHECKING:
    from rich.console import RenderableType

_EVERY_S = 5.0
_WIDTH = 30
_STATES = {
    "": "starting",
    "preparing": "getting ready",
    "measuring": "measuring every worker, then planning",
    "training": "training",
}
TITLES = {"alone": "each worker alone", "even": "evenly, as DDP does", "planned": "as planned"}


class WorkerOutput(io.BytesIO):
    """Takes the labelled lines of workers; lines that are not ours are written to standard error."""

    def __init__(self, board: Board, show: Callable[[], None]) -> None:
        super().__init__()
        self._board, self._show = board, show

    def write(self, data: Any, /) -> int:
        """Take whole lines, as the launcher writes them."""
        for line in bytes(data).decode(errors="replace").splitlines():
            label, _, text = line.partition(" ")
            if not (label[1:-1].isdigit() and self._board.read_line(int(label[1:-1]), text)):
                sys.stderr.write(line + "\n")
        self._show()
        return len(data)


@contextmanager
def show_progress(board: Board, speeds: Sequence[float]) -> Iterator[Callable[[], None]]:
    """Show the board on standard error; yields what is to be called when it has changed."""
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True, markup=False, highlight=False)
    if not console.is_terminal:
        yield _LinePrinter(board).show
        return
    with Live(console=console, refresh_per_second=8, transient=True, get_renderable=lambda: render(board, speeds)):
        yield lambda: None


class _LinePrinter:
    """Prints to what is not a terminal: a line when a phase begins, then one every few seconds."""

    def __init__(self, board: Board) -> None:
        self._board, self._said, self._at_s = board, "", time.monotonic()

    def show(self) -> None:
        """Print a line if it is time."""
        text = headline(self._board)
        now_s = time.monotonic()
        if text == self._said or (text[:12] == self._said[:12] and now_s - self._at_s < _EVERY_S):
            return
        self._said, self._at_s = text, now_s
        sys.stderr.write(text + "\n")


def headline(board: Board) -> str:
    """Return the state of the demo in one line."""
    if board.now is None:
        return "starting the workers"
    name, phase = board.now
    title = TITLES.get(name, name)
    if phase.state != "training":
        return f"{title}: {_STATES.get(phase.state, phase.state)}"
    busy = " / ".join(f"{lane.part(lane.busy_s):.0%}" for lane in phase.lanes)
    done = min(lane.steps for lane in phase.lanes)
    return f"{title}: step {done} of {phase.steps}, {phase.samples_per_s:.0f} samples/s, busy {busy}"


def render(board: Board, speeds: Sequence[float]) -> "RenderableType":
    """Return the headline, and a bar for each worker."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    lines: list[Any] = [Text(headline(board), style="bold")]
    if board.now and board.now[1].state == "training":
        table = Table(box=None, padding=(0, 1))
        for name in ("worker", "batch", "computing, moving, waiting", "busy", "waiting"):
            table.add_column(name, justify="left" if name.startswith("comp") else "right")
        for rank, lane in enumerate(board.now[1].lanes):
            table.add_row(*_row(board.now[1], rank, speeds[rank], lane))
        lines.append(table)
    return Group(*lines)


def _row(phase: TrainingPhase, rank: int, speed: float, lane: Lane) -> list[Any]:
    from rich.text import Text

    busy, moving = (round(_WIDTH * lane.part(each)) for each in (lane.busy_s, lane.moving_s))
    bar = Text("█" * busy, style="green") + Text("▒" * moving, style="yellow")
    bar += Text("·" * max(0, _WIDTH - busy - moving) if lane.seconds else "", style="dim")
    batch = str(phase.batches[rank]) if phase.batches else ""
    return [f"{rank} ({speed:g}x)", batch, bar, f"{lane.part(lane.busy_s):.0%}", f"{lane.part(lane.waiting_s):.0%}"]
