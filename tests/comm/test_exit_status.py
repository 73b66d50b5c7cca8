"""A process knows before it ends whether it ends with success."""

import subprocess
import sys

import pytest

SCRIPT = """
import atexit, sys, threading
from mimatrix.comm.exit_status import ExitStatus
status = ExitStatus()
status.watch()
status.watch()
atexit.register(lambda: print(status.has_failed))
"""


@pytest.mark.parametrize(
    ("ending", "code", "has_failed"),
    [
        ("pass", 0, False),
        ("sys.exit()", 0, False),
        ("sys.exit(0)", 0, False),
        ("sys.exit(3)", 3, True),
        ("sys.exit('lost')", 1, True),
        ("1 / 0", 1, True),
        ("status.note(0)", 0, False),
        ("status.note(76); raise SystemExit(76)", 76, True),
        ("thread = threading.Thread(target=sys.exit, args=(3,)); thread.start(); thread.join()", 0, False),
    ],
)
def test_exit_status_is_known_to_exit_handlers(ending: str, code: int, has_failed: bool) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT + ending], capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert done.stdout == f"{has_failed}\n"


def test_noted_exit_status_is_the_code_with_which_exit_handlers_end_a_process() -> None:
    ending = "atexit.register(lambda: os._exit(status.code)); status.note(76); 1 / 0"
    done = subprocess.run([sys.executable, "-c", f"import os{SCRIPT}{ending}"], capture_output=True, check=False)
    assert done.returncode == 76
