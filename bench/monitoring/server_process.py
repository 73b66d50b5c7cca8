"""A real server with two devices, and jobs of two ranks whose speeds can be changed."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from mimatrix.api.client import Client
from mimatrix.api.models import Job
from mimatrix.processes.ports import free_port

COMMAND = (sys.executable, "-m", "mimatrix.cli.main")
SCRIPTS = Path(__file__).parent / "scripts"


@dataclass(frozen=True)
class MonitoredServer:
    """A running server, with its data and its log."""

    data: Path
    log: Path
    """What the server says."""

    @property
    def address(self) -> str:
        """Address of the server."""
        return (self.data / "address").read_text().strip()

    @property
    def token(self) -> str:
        """Token of its admin."""
        return (self.data / "token").read_text().strip()

    def client(self) -> Client:
        """Return a client with the admin's token."""
        return Client(self.address, self.token)

    def command(self, *words: str) -> str:
        """Return what `mimatrix WORDS` prints."""
        known = {**os.environ, "MIMATRIX_DATA": str(self.data), "COLUMNS": "250"}
        return subprocess.run(
            [*COMMAND, *words], env=known, check=True, timeout=120, capture_output=True, text=True
        ).stdout

    def submit(self, script: str, *words: str) -> int:
        """Submit a script of this folder on two devices; return the number of its job."""
        self.command("submit", "--devices", "2", str(SCRIPTS / script), "--", *words)
        with self.client() as client:
            return client.jobs(limit=1).jobs[0].id

    def wait_until(self, number: int, wanted: Callable[[Job], bool], within_s: float) -> Job:
        """Wait until a job is as wanted, and return it."""
        deadline = time.monotonic() + within_s
        with self.client() as client:
            while not wanted(job := client.job(number)):
                assert time.monotonic() < deadline, f"job {number} is {job.state}: {job.reason}"
                time.sleep(0.2)
        return job


@contextmanager
def run_server() -> Iterator[MonitoredServer]:
    """Run a server, and end it and its jobs afterwards."""
    with tempfile.TemporaryDirectory(prefix="mimatrix-monitoring-") as folder:
        server = MonitoredServer(Path(folder) / "data", Path(folder) / "said")
        words = ["up", "--data", str(server.data), "--port", str(free_port("127.0.0.1")), "--devices", "2"]
        with server.log.open("w") as said:
            process = subprocess.Popen([*COMMAND, *words], stdout=said, stderr=said)
        try:
            deadline = time.monotonic() + 60
            while not (server.data / "token").is_file() or not _answers(server):
                assert time.monotonic() < deadline, f"the server did not come up: {server.log.read_text()}"
                time.sleep(0.1)
            yield server
        finally:
            _end_jobs(server)
            process.terminate()
            process.wait(timeout=30)


def _answers(server: MonitoredServer) -> bool:
    try:
        with server.client() as client:
            client.nodes()
    except Exception:  # noqa: BLE001 (it is about to come up)
        return False
    return True


def _end_jobs(server: MonitoredServer) -> None:
    with server.client() as client:
        running = [job.id for job in client.jobs(states=("starting", "profiling", "training", "saving")).jobs]
        for number in running:
            client.act(number, "cancel")
    for number in running:
        server.wait_until(number, lambda job: job.state in ("cancelled", "failed", "done"), 60)
