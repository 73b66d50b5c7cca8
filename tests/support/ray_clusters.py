"""Real Ray clusters for tests: a raylet for each node, all on this machine, with a token."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

UP_S = 60.0
TOKEN = "0123456789abcdef0123456789abcdef"


@dataclass(frozen=True)
class Machine:
    """How one raylet is started."""

    name: str
    address: str
    words: tuple[str, ...]
    before: tuple[str, ...] = ()
    """Words in front of all, such as those that enter a network namespace."""


MACHINES = (
    Machine("left", "127.0.0.2", ("--num-cpus", "1", "--labels", "mimatrix.rack=rack-1")),
    Machine("middle", "127.0.0.3", ("--num-cpus", "1", "--labels", "mimatrix.rack=rack-2")),
    Machine(
        "right",
        "127.0.0.4",
        ("--num-cpus", "1", "--labels", "mimatrix.rack=rack-2,mimatrix.kind=a40,mimatrix.devices=2"),
    ),
)


@dataclass
class RayCluster:
    """The first machine is the head."""

    folder: Path
    machines: Sequence[Machine] = MACHINES
    port: int = 0
    """Of the head; any, without."""
    processes: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return f"{self.machines[0].address}:{self.port}"

    @property
    def environment(self) -> dict[str, str]:
        """Of a launcher, and of Ray."""
        told = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        quick = {"period_ms": 300, "timeout_ms": 1000, "failure_threshold": 3, "initial_delay_ms": 0}
        return {
            **told,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(self.folder / "token"),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_worker_niceness": "0",
            # How long a node that is cut off goes on.
            "MIMATRIX_CUT_OFF_S": "8",
            "MIMATRIX_NODE_FOLDER": str(self.folder / "nodes"),
            **{f"RAY_health_check_{name}": str(value) for name, value in quick.items()},
        }

    def start(self) -> None:
        (self.folder / "token").write_text(TOKEN)
        self.port = self.port or _free_port()
        head, *others = self.machines
        self._start(head, "--head", "--port", str(self.port), "--include-dashboard=false")
        self._until_said(head.name, "Ray runtime started")
        for machine in others:
            self._start(machine, "--address", self.address)
        for machine in others:
            self._until_said(machine.name, "Ray runtime started")

    def kill(self, name: str) -> None:
        """As if the machine had lost its power, but for what Ray did not start."""
        process = self.processes.pop(name)
        for pid in _session(process.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait(timeout=10)

    def raylet(self, name: str) -> int:
        """Return the process of the raylet alone."""
        return next(pid for pid in _session(self.processes[name].pid) if _command(pid).endswith("raylet/raylet"))

    def agents(self, name: str) -> list[int]:
        """Return the processes of our actors there, of all places that have teams there."""
        return [pid for pid in _session(self.processes[name].pid) if "NodeAgent" in _command(pid)]

    def stop(self) -> None:
        for name in reversed([*self.processes]):
            self.kill(name)

    def _start(self, machine: Machine, *words: str) -> None:
        command = [
            *machine.before,
            str(Path(sys.executable).parent / "ray"),
            "start",
            "--block",
            "--node-ip-address",
            machine.address,
            "--node-name",
            machine.name,
            # Sockets have short names, and raylets that start at once must not share a folder.
            "--temp-dir",
            str(self.folder / machine.name),
            "--object-store-memory",
            "80000000",
            "--include-log-monitor=false",
            *machine.words,
            *words,
        ]
        with self._log(machine.name).open("wb") as log:
            self.processes[machine.name] = subprocess.Popen(
                command, env=self.environment, cwd=self.folder, stdout=log, stderr=log, start_new_session=True
            )

    def _until_said(self, name: str, word: str) -> None:
        deadline = time.monotonic() + UP_S
        while word not in (said := self._log(name).read_text()):
            assert self.processes[name].poll() is None, said + self._services(name)
            assert time.monotonic() < deadline, said + self._services(name)
            time.sleep(0.1)

    def _services(self, name: str) -> str:
        """Return the last lines that Ray's own processes there logged."""
        files = sorted((self.folder / name).glob("session_*/logs/*_server.*"))
        return "".join(f"\n{file.name}: {file.read_text(errors='replace')[-2000:]}" for file in files)

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"


@contextmanager
def ray_cluster(folder: Path, machines: Sequence[Machine] = MACHINES, port: int = 0) -> Iterator[RayCluster]:
    cluster = RayCluster(folder, machines, port)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def _session(leader: int) -> list[int]:
    """All processes of a session; Ray gives those that it starts groups of their own, but no sessions."""
    found = []
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with suppress(OSError):
                if os.getsid(int(path.name)) == leader:
                    found.append(int(path.name))
    return found


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _command(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()
    return ""
