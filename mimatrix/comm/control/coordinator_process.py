"""The coordinator as a process of its own, so that no rank is special: it outlives the rank that started it.

It ends when no rank is connected any more, so it never outlives its job. It imports neither torch nor anything that is
installed, and starts in about a tenth of a second, while the ranks already connect: its socket exists before.
"""

import json
import logging
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from mimatrix.comm.control.coordinator import Coordinator
from mimatrix.comm.control.liveness import silence_limit
from mimatrix.comm.control.server import ServerLimits
from mimatrix.core import environment
from mimatrix.core.errors import WorldError

_logger = logging.getLogger(__name__)
_ROOT = Path(__file__).resolve().parents[3]
_SECRETS = (environment.JOB_SECRET.name, environment.TOKEN.name)
_IDLE_S = 1.0
"""It shares the processor with ranks, so it does not wake up without need."""
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class CoordinatorProcess:
    """A coordinator that was started for a job."""

    def __init__(self, process: "subprocess.Popen[str]", port: int) -> None:
        self.port = port
        self.pid = process.pid
        threading.Thread(target=_reap, args=(process,), name="mimatrix-coordinator-process", daemon=True).start()


def start_coordinator(address: str, generation: int, token: str, world_size: int) -> CoordinatorProcess:
    """Listen on a free port of `address`, and start a process that serves there.

    Raises:
        WorldError: This host has no such address, or no process can be started.
    """
    options = {"generation": generation, "token": token, "world_size": world_size, "silence_s": silence_limit()}
    try:
        with socket.create_server((address, 0), backlog=1024) as listener:
            port: int = listener.getsockname()[1]
            process = _spawn(listener)
    except OSError as error:
        raise WorldError(
            f"no coordinator can be started at {address} ({error}); set {environment.ADDRESS.name} on rank 0 to an "
            "address of its host that all ranks reach"
        ) from error
    assert process.stdin
    with suppress(BrokenPipeError):  # it has ended already, and says why
        process.stdin.write(json.dumps(options))
        process.stdin.close()
    return CoordinatorProcess(process, port)


def serve(listener: socket.socket, options: dict[str, object]) -> None:
    """Be the coordinator, until no rank is connected any more."""
    for number in _IGNORED:  # whoever ends a rank must not end what tells the others
        signal.signal(number, signal.SIG_IGN)
    with suppress(ValueError, OSError):  # more ranks than the usual limit
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    limits = ServerLimits(silence_s=float(str(options["silence_s"])), idle_s=_IDLE_S)
    Coordinator(
        listener,
        int(str(options["generation"])),
        world_size=int(str(options["world_size"])),
        token=str(options["token"]),
        limits=limits,
    ).serve()


def main(arguments: Sequence[str]) -> None:
    """Serve on the listening socket whose descriptor is given; the options come on standard input."""
    (descriptor,) = arguments
    logging.basicConfig(format="%(message)s")
    serve(socket.socket(fileno=int(descriptor)), json.load(sys.stdin))


def _spawn(listener: socket.socket) -> "subprocess.Popen[str]":
    # Without `site` nothing that is installed is looked for, and with `-P` no module of the script's folder is found.
    words = [sys.executable, "-S", "-P", "-m", "mimatrix.comm.control", str(listener.fileno())]
    environ = {name: value for name, value in os.environ.items() if name not in _SECRETS}
    return subprocess.Popen(  # noqa: S603 (this program itself)
        words,
        env=environ | {"PYTHONPATH": str(_ROOT)},
        cwd="/",
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        pass_fds=[listener.fileno()],
        start_new_session=True,
    )


def _reap(process: "subprocess.Popen[str]") -> None:
    """Wait for the coordinator, and say why it ended if it failed."""
    assert process.stderr
    with process.stderr:
        last_words = process.stderr.read()
    if code := process.wait():
        _logger.error("the coordinator ended with exit code %d: %s", code, last_words.strip() or "it said nothing")
