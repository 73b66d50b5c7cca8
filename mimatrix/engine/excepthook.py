"""A mistake in a script, as a sentence and its place, not a traceback; with an exit code that nobody retries."""

import sys
import traceback
from pathlib import Path
from types import TracebackType

from mimatrix.core.errors import UserError

BAD_INPUT = 2
_OURS = Path(__file__).resolve().parents[1]


def tell_mistakes() -> None:
    """From now on, where nobody else has asked to be told of what a script raises."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _tell


def told(error: UserError) -> str:
    """What is wrong, and the line of the script that led there."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_users(frame.filename)]
    if not frames:
        return str(error)
    return f"{error} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"


def _tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not isinstance(error, UserError):
        sys.__excepthook__(kind, error, trace)
        return
    # torch.distributed collects what is written to sys.stderr meanwhile, and drops it when this ends the process.
    print(f"mimatrix: {told(error)}", file=sys.__stderr__, flush=True)
    raise SystemExit(BAD_INPUT)


def _is_users(file: str) -> bool:
    """Not of this package, nor of another one, nor what Python runs before a script."""
    path = Path(file)
    return path.is_file() and not path.resolve().is_relative_to(_OURS) and "site-packages" not in path.parts
