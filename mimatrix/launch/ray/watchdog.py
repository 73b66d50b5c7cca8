"""Wait for the end of a node's agent, and kill all teams of the node: `python -m mimatrix.launch.ray.watchdog FOLDER`.

The agent holds the other end of our standard input, which the kernel closes when it dies.
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
    """Wait in a process that is not a child of the agent."""
    if os.fork():
        return
    while os.read(0, 4096):
        pass
    kill_all(Path(sys.argv[1]), time.monotonic() + _KILL_S)


def kill_all(folder: Path, deadline_s: float) -> None:
    """Kill every team of the directory; give up at the deadline."""
    while _kill(folder) and time.monotonic() < deadline_s:
        time.sleep(_AGAIN_S)


def _kill(folder: Path) -> int:
    """Kill all teams that have not ended, and return how many those are."""
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
