"""A user's mistake as one sentence with its line, instead of a traceback, and with an exit code that is not retried.

A rank that stops because another one was lost says so in one line: the traceback that matters is the other one's.
"""

import atexit
import os
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from mimatrix.comm.endpoint_registry import find_failure, has_joined, note_exit_code
from mimatrix.core.errors import (
    DifferentCalls,
    PeerLost,
    SaveError,
    UserError,
)
from mimatrix.core.exit_codes import BAD_INPUT, FAILED, PEER_LOST

_NEWS_S = 2.0
"""How long the news that a rank was lost may take, after the GPU failed because of it."""
_EXIT_S = 15.0
"""How long exit handlers may take in a process of a job that has failed."""
_PACKAGE = Path(__file__).resolve().parents[1]
_LIBRARY = Path(traceback.__file__).parent


def install_excepthook() -> None:
    """Show uncaught `UserError`, `PeerLost` and `SaveError` as a sentence, unless the program has a hook of its own."""
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = _excepthook


def format_user_error(error: UserError | SaveError) -> str:
    """Return what is wrong, and the line of the user's script that led there."""
    if isinstance(error, DifferentCalls):
        return str(error)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if _is_user_code(frame.filename)]
    if not frames:
        return str(error)
    return f"{error} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})"


def _excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    match error:
        case UserError():
            _exit_with(format_user_error(error), BAD_INPUT)
        case PeerLost():
            rank = os.environ.get("RANK")
            who = "stopped" if rank is None else f"rank {rank} stopped"
            _exit_with(f"{who}, because {error}", PEER_LOST)
        case SaveError():
            _exit_with(format_user_error(error), FAILED)
        case RuntimeError() if _is_of_gpu(error) and isinstance(lost := find_failure(_NEWS_S), PeerLost):
            _excepthook(PeerLost, lost, trace)
        case _:
            sys.__excepthook__(kind, error, trace)


def _is_of_gpu(error: RuntimeError) -> bool:
    """Return whether torch could not use a GPU, or NCCL failed: perhaps because another rank was lost."""
    return any(word in str(error) for word in ("CUDA", "NCCL"))


def _exit_with(sentence: str, code: int) -> NoReturn:
    # Not logged: torch.distributed collects what is written to sys.stderr now, and drops it when the process ends.
    print(f"mimatrix: {sentence}", file=sys.__stderr__, flush=True)
    if has_joined():
        # A collective of Gloo or NCCL may be in flight for ever; to take it apart would hang, or abort the process.
        timer = threading.Timer(_EXIT_S, os._exit, (code,))
        timer.daemon = True
        timer.start()
        note_exit_code(code)
        atexit._run_exitfuncs()
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(code)
    raise SystemExit(code)


def _is_user_code(file: str) -> bool:
    """Return whether a file is not part of this package, of another package, or of Python's own library."""
    path = Path(file)
    is_library = path.is_relative_to(_LIBRARY) or path.resolve().is_relative_to(_LIBRARY)
    return (
        path.is_file()
        and not is_library
        and not path.resolve().is_relative_to(_PACKAGE)
        and "site-packages" not in path.parts
    )
