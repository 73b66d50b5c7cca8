"""`python -m mimatrix.worker SCRIPT ARGS...`: one worker of a job. It finds the others, and runs the script as a rank.

The script may know nothing of MiMatrix: it finds torchrun's variables. One that calls `mimatrix.init` is reported on,
and saves and leaves when the server says so.
"""

import os
import runpy
import sys
from pathlib import Path

from mimatrix.core import environment
from mimatrix.core.errors import MiMatrixError, UserError
from mimatrix.engine.excepthook import BAD_INPUT, told
from mimatrix.engine.observers import OBSERVERS
from mimatrix.wire.client import Client
from mimatrix.worker.device_metrics import link_gauge
from mimatrix.worker.rendezvous import WorkerIdentity, enter, join, own_address
from mimatrix.worker.reporting import Reporter

GAVE_WAY = 1
_SECRETS = (environment.TOKEN.name,)


def main(words: list[str]) -> None:
    """Join, run, report."""
    mine = WorkerIdentity.read(os.environ)
    for name in _SECRETS:
        os.environ.pop(name, None)  # nothing that the script starts needs it
    with Client(mine.server, mine.token) as client:
        joined = join(client, mine, _say)
        enter(joined, mine)
        # One of a machine is enough to say what its link carries.
        link = link_gauge(own_address(mine.server)) if joined.local_rank == 0 else lambda: None
        reporter = Reporter(client, mine, Path(environment.CHECKPOINTS.get(default="checkpoints")), link)
        OBSERVERS.append(reporter.observe)
        reporter.start()
        try:
            _run(words)
        finally:
            reporter.stop()


def _run(words: list[str]) -> None:
    script, *_ = words
    if not Path(script).is_file():
        raise UserError(f'there is no "{script}" in the folder of the job; submit the script by its path')
    sys.argv[:] = words
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


def _say(sentence: str) -> None:
    sys.stderr.write(f"mimatrix: {sentence}\n")
    sys.stderr.flush()


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        _say(told(error))
        sys.exit(BAD_INPUT)
    except MiMatrixError as error:
        _say(str(error))
        sys.exit(GAVE_WAY)
