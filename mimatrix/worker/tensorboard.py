"""Figures of a job for TensorBoard: what `run.log` was given, and how fast it went."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
FOLDER = "tensorboard"
_FLUSHED_S = 10
_MOST = 10
"""Points of a curve in a report: TensorBoard draws a thousand of it in the end, and each takes time from a step."""


class TensorBoardWriter:
    """Writes event files into a folder below a job's checkpoints, if TensorBoard is installed; nothing otherwise."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / FOLDER
        self._writer: Any = None
        self._written = 0
        self._step = -1
        self._is_missing = False

    def follow(self, run: Any, speeds: Mapping[str, float]) -> None:
        """Write down what was logged since the last time, and how fast it goes now."""
        new = run.logged(self._written)
        if self._is_missing or not (new or run.step > self._step >= 0):
            return
        if self._writer is None:
            self._open()
        if self._writer is not None:
            for name, curve in _by_name(new).items():
                for step, value in _thinned(curve):
                    self._writer.add_scalar(name, value, step)
            if run.step > self._step:
                for name, value in speeds.items():
                    self._writer.add_scalar(f"speed/{name}", value, run.step)
        self._written, self._step = self._written + len(new), run.step

    def close(self) -> None:
        """No more."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _open(self) -> None:
        try:
            writers = import_module("torch.utils.tensorboard")
            self._writer = writers.SummaryWriter(str(self._folder), flush_secs=_FLUSHED_S)
        except (ImportError, OSError):  # not installed, or nowhere to write to: training is no worse for it
            self._is_missing = True


def _by_name(entries: Sequence[tuple[int, Mapping[str, float]]]) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for step, means in entries:
        for name, value in means.items():
            found.setdefault(name, []).append((step, value))
    return found


def _thinned(curve: list[T]) -> list[T]:
    """The last point, and others at the same distance."""
    distance = -(-len(curve) // _MOST) or 1
    return curve[::-1][::distance][::-1]
