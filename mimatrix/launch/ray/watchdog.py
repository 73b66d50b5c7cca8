"""`python -m mimatrix.launch.ray.watchdog FOLDER`: waits for the end of a node's keeper, and kills all that it kept.

The keeper holds the other end of our standard input, and has to do nothing for us to know that it is gone.
"""

import os
import sys
import time
from contextlib import suppress
from pathlib import Path

from mimatrix.core.errors import MiMatrixError
from mimatrix.launch.ray.node_agent import parts_in

_KILL_S, _AGAIN_S = 60.0, 0.2


def main() -> None:
    """Go on in a process that is nobody's child."""
    if os.fork():
        return
    while os.read(0, 4096):
        pass
    kill_all(Path(sys.argv[1]), time.monotonic() + _KILL_S)


def kill_all(folder: Path, deadline_s: float) -> None:
    """Kill every team of the folder; give up at the deadline."""
    while _kill(folder) and time.monotonic() < deadline_s:
        time.sleep(_AGAIN_S)


def _kill(folder: Path) -> int:
    """How many have not ended yet."""
    left = 0
    for team, launcher in parts_in(folder):
        with suppress(MiMatrixError, OSError):
            state = launcher.states().get(team)
            if state and not state.has_ended:
                left += 1
                launcher.end(team, now=True)
    return left


if __name__ == "__main__":
    main()
