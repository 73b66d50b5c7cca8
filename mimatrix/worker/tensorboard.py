"""Figures of a job for TensorBoard: what `run.log` was given, step by step, and how fast it went."""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

FOLDER = "tensorboard"
_FLUSHED_S = 10


class Board:
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
            for step, means in new:
                self._add(means, step)
            if run.step > self._step:
                self._add({f"speed/{name}": value for name, value in speeds.items()}, run.step)
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

    def _add(self, figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
