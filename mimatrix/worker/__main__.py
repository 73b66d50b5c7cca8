"""`python -m mimatrix.worker SCRIPT ARGS...`: one worker of a job. It finds its peers, and runs the script as a rank.

The script need not know MiMatrix: it finds torchrun's variables. If it calls `mimatrix.init`, its progress is reported,
and it saves and exits when the job server asks for it.
"""

import logging
import os
import runpy
import sys
from pathlib import Path

from mimatrix.api.client import Client
from mimatrix.comm.tcp_store import serve_store
from mimatrix.core import environment
from mimatrix.core.errors import MiMatrixError, UserError
from mimatrix.core.exit_codes import BAD_INPUT, FAILED
from mimatrix.core.logs import configure_logging
from mimatrix.engine.excepthook import format_user_error
from mimatrix.engine.run_hooks import observe_runs
from mimatrix.worker.device_metrics import link_sampler
from mimatrix.worker.rendezvous import WorkerIdentity, join, own_address, set_environment, take_token
from mimatrix.worker.reporting import Reporter

_SECRETS = (environment.TOKEN.name, environment.TOKEN_FD.name)
# Not `__name__`, which is `__main__` here.
logger = logging.getLogger("mimatrix.worker")


def main(arguments: list[str]) -> None:
    """Join the job, run the script, and report while it runs."""
    identity = WorkerIdentity.read(take_token(os.environ))
    for name in _SECRETS:
        os.environ.pop(name, None)  # neither the script nor its child processes need it
    with Client(identity.server, identity.token) as client:
        joined = join(client, identity)
        set_environment(joined, identity)
        store = serve_store()  # the script's `init_process_group` finds it
        # One worker per machine reports the traffic of its link.
        sample_link = link_sampler(own_address(identity.server)) if joined.local_rank == 0 else lambda: None
        checkpoints = Path(environment.CHECKPOINTS.get(default="checkpoints"))
        reporter = Reporter(client, identity, checkpoints, sample_link)
        reporter.start()
        try:
            with observe_runs(reporter.observe):
                _run_script(arguments)
        finally:
            reporter.stop()
            del store


def _run_script(arguments: list[str]) -> None:
    script, *_ = arguments
    if not Path(script).is_file():
        raise UserError(f'there is no "{script}" in the directory of the job; submit the script by its path')
    sys.argv[:] = arguments
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    configure_logging()
    try:
        main(sys.argv[1:])
    except UserError as error:
        logger.error("%s", format_user_error(error))
        sys.last_value = error  # as if it were uncaught: a failed checkpoint must not change the exit code
        sys.exit(BAD_INPUT)
    except MiMatrixError as error:
        logger.error("%s", error)
        sys.exit(FAILED)
