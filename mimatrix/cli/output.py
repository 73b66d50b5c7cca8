"""Output of commands: tables and progress on a terminal, JSON for machines, pictures in files."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from time import monotonic
from typing import TYPE_CHECKING

from mimatrix.core.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Console

_PATIENCE_S = 10.0


def plain_console() -> "Console":
    """Return a console for tables and sentences on standard output. Markup is off, since names come from files."""
    from rich.console import Console

    return Console(markup=False, highlight=False)


def say(sentence: str) -> None:
    """Print a sentence on standard error, apart from what workers print."""
    sys.stderr.write(f"mimatrix: {sentence}\n")
    sys.stderr.flush()


def print_json(value: object) -> None:
    """Print one JSON value on standard output, and nothing else."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")


@contextmanager
def progress(what: str, hint: str = "") -> Iterator[Callable[[float], None]]:
    """Show a status line on standard error, if that is a terminal, while work is in progress.

    Yields a function that takes the completed part. After some seconds the line shows `hint`, too.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    started = monotonic()
    with console.status(Text(what)) as status:

        def show(done: float) -> None:
            advice = hint if monotonic() - started > _PATIENCE_S else ""
            status.update(Text(f"{what}: {done:.0%}{advice}"))

        yield show


def check_file(path: Path, endings: tuple[str, ...]) -> None:
    """Refuse a file that could not be written, before the work is done."""
    if path.suffix.lower() not in endings:
        raise UserError(f'"{path}" has an ending that cannot be written here; use {" or ".join(endings)}')
    with _writing(path):
        folder = path.absolute().parent
        if not folder.is_dir():
            what = "is a file" if folder.exists() else "does not exist"
            raise UserError(f'the folder of "{path}" {what}; make it first, or choose another')
        if path.is_dir() or not os.access(path if path.exists() else folder, os.W_OK):
            raise UserError(f'"{path}" cannot be written; choose another file')
        if not path.exists():
            # Root may write everywhere, yet some folders take no files.
            TemporaryFile(dir=folder).close()


def save_picture(figure: "Figure", path: Path) -> None:
    """Write the picture in the format that the name of the file asks for."""
    with _writing(path):
        figure.savefig(path, dpi=150, bbox_inches="tight")


def write_json(value: object, path: Path) -> None:
    """Write one JSON value to a file."""
    write_text(json.dumps(value, allow_nan=False), path)


def write_text(text: str, path: Path) -> None:
    """Write text to a file."""
    with _writing(path):
        path.write_text(text, encoding="utf-8")


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Turn errors of the operating system into a sentence about a file."""
    try:
        yield
    except OSError as error:
        raise UserError(f'"{path}" cannot be written ({error.strerror or error}); choose another file') from None
