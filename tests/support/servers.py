"""Servers for tests: in this process over a real database and the real local launcher, or as a real process."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient

from mimatrix.api.client import Client
from mimatrix.api.models import Job, Role
from mimatrix.launch import Launcher, LocalLauncher, cores
from mimatrix.server.app import create_app
from mimatrix.server.auth.tokens import Authenticator, issue
from mimatrix.server.context import Context
from mimatrix.server.controller.job_environment import JobEnvironment
from mimatrix.server.controller.reconcile import Controller
from mimatrix.server.controller.retention import RetentionSettings
from mimatrix.server.db.engine import address_in, opened
from mimatrix.server.jobs.code_archives import CodeArchives
from mimatrix.server.jobs.quotas import Quotas
from support.executors import AtOnce

SCRIPTS = Path(__file__).parents[1] / "server" / "scripts"


@dataclass
class AppServer:
    """A server without a socket, and without a thread that calls `controller.reconcile()`."""

    context: Context
    controller: Controller
    http: TestClient
    secrets: dict[str, str] = field(default_factory=dict)

    def headers(self, who: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.secrets[who]}"} if who else {}

    def ask(self, who: str, method: str, path: str, **what: Any) -> Any:
        return self.http.request(method, path, headers=self.headers(who), **what)


@contextmanager
def app_server(
    folder: Path,
    database: str = "",
    devices: int = 4,
    clock: Callable[[], float] = time.time,
    wrap: Callable[[Launcher], Launcher] = lambda launcher: launcher,
    quotas: Quotas = Quotas(),
    checkpoints: str = "",
    executor: Executor | None = None,
    retention: RetentionSettings = RetentionSettings(),
) -> Iterator[AppServer]:
    """Yield a server that starts teams within its turns, unless the executor has threads.

    A `clock` with a method `monotonic` gives that time, too.
    """
    engine, sessions = opened(database or address_in(folder))
    launcher = LocalLauncher(folder / "launcher", devices=cores(devices))
    archives, authenticator = CodeArchives(folder / "code-archives"), Authenticator(sessions, clock)
    monotonic = getattr(clock, "monotonic", time.monotonic)
    context = Context(sessions, wrap(launcher), archives, authenticator, clock, monotonic, quotas)
    variables = {"PATH": os.environ["PATH"], "PYTHONUNBUFFERED": "1"}
    environment = JobEnvironment(
        address="http://127.0.0.1:1", command=(sys.executable,), variables=variables, checkpoints=checkpoints
    )
    controller = Controller(context, environment, executor or AtOnce(), retention)
    with TestClient(create_app(context, controller), raise_server_exceptions=False) as http:
        found = AppServer(context, controller, http)
        with sessions.begin() as session:
            for name, role in (("ann", Role.ADMIN), ("ben", Role.USER), ("cho", Role.USER), ("dee", Role.VIEWER)):
                found.secrets[name] = issue(session, name, role, clock())[1]
        try:
            yield found
        finally:
            end_all(folder)
    launcher.close()
    engine.dispose()


class ServerProcess:
    """`mimatrix up` as a process."""

    def __init__(self, data: Path, *words: str, devices: int = 3) -> None:
        self.data, self._words = data, ("--devices", str(devices), *words)
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.process: subprocess.Popen[str] | None = None
        self.log = data.parent / f"{data.name}.log"

    def start(self) -> "ServerProcess":
        words = [
            sys.executable,
            "-m",
            "mimatrix.cli.main",
            "up",
            "--data",
            str(self.data),
            "--port",
            str(self.port),
            *self._words,
        ]
        with self.log.open("a") as log:
            self.process = subprocess.Popen(words, stderr=log, stdout=log, text=True)
        deadline = time.monotonic() + 40
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.said()
            if (self.data / "address").is_file() and _answers(self.port):
                return self
            time.sleep(0.05)
        raise AssertionError(f"the server did not come up: {self.said()}")

    def said(self) -> str:
        return self.log.read_text()

    def kill(self, number: int = signal.SIGKILL) -> int:
        assert self.process
        self.process.send_signal(number)
        return self.process.wait(timeout=30)

    def client(self) -> Client:
        return Client((self.data / "address").read_text().strip(), (self.data / "token").read_text().strip())

    def command(self, *words: str, **more: Any) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "MIMATRIX_DATA": str(self.data), "COLUMNS": "200"}
        environment = {
            name: value for name, value in environment.items() if name not in ("MIMATRIX_SERVER", "MIMATRIX_TOKEN")
        }
        return subprocess.run(
            [sys.executable, "-m", "mimatrix.cli.main", *words],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            **more,
        )

    def submit(self, script: str, *words: str) -> int:
        done = self.command("submit", str(SCRIPTS / script), *words)
        assert done.returncode == 0, done.stderr
        found = re.search(r"job (\d+) ", done.stdout)
        assert found
        return int(found[1])

    def until(self, number: int, wanted: Callable[[Job], bool], within_s: float = 60) -> Job:
        deadline = time.monotonic() + within_s
        with self.client() as client:
            while not wanted(job := client.job(number)):
                assert time.monotonic() < deadline, f"job {number} is {job.state}: {job.reason}\n{self.said()}"
                time.sleep(0.1)
        return job


@contextmanager
def server(data: Path, *words: str, devices: int = 3) -> Iterator[ServerProcess]:
    found = ServerProcess(data, *words, devices=devices).start()
    try:
        yield found
    finally:
        if found.process and found.process.poll() is None:
            found.kill(signal.SIGTERM)
        end_all(data)


def end_all(data: Path) -> None:
    """No team of a test stays behind."""
    launcher = LocalLauncher(data / "launcher")
    for name, state in launcher.states().items():
        if not state.has_ended:
            launcher.end(name, now=True)
    launcher.close()


def _answers(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
