"""A user's mistake as one sentence with its line, instead of a traceback, and with an exit code that is not retried."""

import sys
import traceback
from pathlib import Path
from types import TracebackType

from mimatrix.core.errors import UserError

EXIT_BAD_INPUT = 2
_PACKAGE = Path(__file__).resolve().parents[1]


def install_excepthook() -> None:
    """Show uncaught `UserError`s as a sentence, unless the program has an exception hook of its own."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _excepthook


def format_user_error(error: UserError) -> str:
    """Return what is wrong, and the line of the user's script that led there."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_user_code(frame.filename)]
    if not frames:
        return str(error)
    return f"{error} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, UserError):
        sys.__excepthook__(kind, error, trace)
        return
    # Not logged: torch.distributed collects what is written to sys.stderr now, and drops it when the process ends.
    print(f"mimatrix: {format_user_error(error)}", file=sys.__stderr__, flush=True)
    raise SystemExit(EXIT_BAD_INPUT)


def _is_user_code(file: str) -> bool:
    """Return whether a file is not part of this package, of another package, or of what runs before a script."""
    path = Path(file)
    return path.is_file() and not path.resolve().is_relative_to(_PACKAGE) and "site-packages" not in path.parts
