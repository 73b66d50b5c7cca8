"""What an uncaught error looks like: a user's mistake has the line of the script, a lost rank one sentence."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mimatrix.core.errors import UserError
from mimatrix.core.exit_codes import PEER_LOST
from mimatrix.engine.excepthook import format_user_error


class Refusing:
    """Cannot be copied."""

    def __deepcopy__(self, memo: object) -> "Refusing":
        raise UserError("it cannot be copied; make another")


def test_lines_of_the_standard_library_are_not_named() -> None:
    with pytest.raises(UserError) as caught:
        copy.deepcopy({"a": [Refusing()]})
    trace = caught.value.__traceback__
    assert trace
    assert trace.tb_next
    last = trace.tb_next
    while last.tb_next and last.tb_next.tb_next:
        last = last.tb_next
    assert Path(last.tb_frame.f_code.co_filename).name == "copy.py"
    last.tb_next = None  # as if the error came from this package: what is left ends in copy.py
    assert format_user_error(caught.value) == (
        f"it cannot be copied; make another ({Path(__file__).name}, line {trace.tb_lineno})"
    )


FAILURES = {
    "GPU, after a lost rank": ("CUDA error: unspecified launch failure", True),
    "GPU alone": ("CUDA error: unspecified launch failure", False),
    "another, after a lost rank": ("the shapes do not match", True),
}
"""What an uncaught RuntimeError says, and whether a rank was lost before it."""
SCRIPT = """
import json, os, sys
from mimatrix.core.errors import PeerLost
from mimatrix.engine import excepthook

lost = PeerLost("rank 1 on b was lost in all_reduce of 10 float32: its connection closed", 1)
excepthook.install_excepthook()
codes = {}
for name, (text, has_lost) in json.loads(sys.argv[1]).items():
    child = os.fork()
    if not child:
        os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY), 2)
        excepthook.find_failure = lambda wait_s: lost if has_lost else None
        raise RuntimeError(text)
    codes[name] = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(json.dumps(codes))
"""


@pytest.fixture(scope="module")
def endings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, str]]:
    """How a process ends with each of these failures: its exit code, and what it wrote."""
    folder = tmp_path_factory.mktemp("endings")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT, json.dumps(FAILURES)],
        cwd=folder,
        env=os.environ | {"RANK": "0"},
        stdout=subprocess.PIPE,
        timeout=60,
        check=True,
    )
    return {name: (code, (folder / name).read_text()) for name, code in json.loads(done.stdout).items()}


def test_failure_of_a_gpu_after_a_lost_rank_names_the_rank(endings: dict[str, tuple[int, str]]) -> None:
    assert endings["GPU, after a lost rank"] == (
        PEER_LOST,
        "mimatrix: rank 0 stopped, because rank 1 on b was lost in all_reduce of 10 float32: its connection closed\n",
    )


@pytest.mark.parametrize("name", ["GPU alone", "another, after a lost rank"])
def test_error_that_no_lost_rank_explains_keeps_its_traceback(name: str, endings: dict[str, tuple[int, str]]) -> None:
    code, written = endings[name]
    assert code == 1
    assert written.startswith("Traceback (most recent call last)")
    assert written.endswith(f"RuntimeError: {FAILURES[name][0]}\n")
