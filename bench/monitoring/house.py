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
class House:
    """One that runs."""

    data: Path
    log: Path
    """What the server says."""

    @property
    def address(self) -> str:
        """Where it is."""
        return (self.data / "address").read_text().strip()

    @property
    def token(self) -> str:
        """Of its admin."""
        return (self.data / "token").read_text().strip()

    def client(self) -> Client:
        """Of its admin."""
        return Client(self.address, self.token)

    def command(self, *words: str) -> str:
        """What the command prints."""
        known = {**os.environ, "MIMATRIX_DATA": str(self.data), "COLUMNS": "250"}
        return subprocess.run(
            [*COMMAND, *words], env=known, check=True, timeout=120, capture_output=True, text=True
        ).stdout

    def submit(self, script: str, *words: str) -> int:
        """A script of this folder on two devices; the number of its job."""
        self.command("submit", "--devices", "2", str(SCRIPTS / script), "--", *words)
        with self.client() as client:
            return client.jobs(limit=1).jobs[0].id

    def until(self, number: int, wanted: Callable[[Job], bool], within_s: float) -> Job:
        """How a job is once it is as wanted."""
        deadline = time.monotonic() + within_s
        with self.client() as client:
            while not wanted(job := client.job(number)):
                assert time.monotonic() < deadline, f"job {number} is {job.state}: {job.reason}"
                time.sleep(0.2)
        return job


@contextmanager
def serving() -> Iterator[House]:
    """A server, until the end."""
    with tempfile.TemporaryDirectory(prefix="mimatrix-monitoring-") as folder:
        house = House(Path(folder) / "data", Path(folder) / "said")
        words = ["up", "--data", str(house.data), "--port", str(free_port("127.0.0.1")), "--devices", "2"]
        with house.log.open("w") as said:
            server = subprocess.Popen([*COMMAND, *words], stdout=said, stderr=said)
        try:
            deadline = time.monotonic() + 60
            while not (house.data / "token").is_file() or not _answers(house):
                assert time.monotonic() < deadline, f"the server did not come up: {house.log.read_text()}"
                time.sleep(0.1)
            yield house
        finally:
            _end_jobs(house)
            server.terminate()
            server.wait(timeout=30)


def _answers(house: House) -> bool:
    try:
        with house.client() as client:
            client.nodes()
    except Exception:  # noqa: BLE001 (it is about to come up)
        return False
    return True


def _end_jobs(house: House) -> None:
    with house.client() as client:
        running = [job.id for job in client.jobs(states=("starting", "profiling", "training", "saving")).jobs]
        for number in running:
            client.act(number, "cancel")
    for number in running:
        house.until(number, lambda job: job.state in ("cancelled", "failed", "done"), 60)
