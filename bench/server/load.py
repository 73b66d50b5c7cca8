"""Simulated workers against one server.

The server is real, its jobs are not: two thousand processes do not fit this machine, so a launcher that only says that its
teams run takes the place of the real one, and the workers are connections that send what workers send.
"""

import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from mimatrix.api.models import PROTOCOL
from mimatrix.launch.devices import DeviceInfo, NodeInfo
from mimatrix.launch.launcher import LogPart, MemberState, Phase, Team, TeamState

JOBS = 20


class FakeLauncher:
    """Says that every team it is given runs; starts nothing."""

    def __init__(self, nodes: tuple[NodeInfo, ...], said: bytes = b"") -> None:
        self._teams: dict[str, Team] = {}
        self._nodes, self._said = nodes, said

    def nodes(self) -> tuple[NodeInfo, ...]:
        """Return the nodes that it was given."""
        return self._nodes

    def start(self, team: Team) -> None:
        """Start nothing; write the team's token to where the simulated workers look for it."""
        self._teams[team.name] = team
        folder = Path(os.environ["LOAD_TOKENS"])
        (folder / team.name).write_text(team.environment["MIMATRIX_TOKEN"])

    def states(self) -> Mapping[str, TeamState]:
        """Return every team as running."""
        return {
            name: TeamState((MemberState(Phase.RUNNING),) * len(team.members)) for name, team in self._teams.items()
        }

    def end(self, team: str, *, now: bool = False) -> None:
        """Forget the team."""
        del now
        self._teams.pop(team, None)

    def read_log(self, team: str, rank: int, offset: int, most: int = 65_536) -> LogPart:
        """Return a part of the same log for every rank."""
        del team, rank
        begin = offset if offset >= 0 else max(0, len(self._said) + offset)
        data = self._said[begin : begin + most]
        return LogPart(data, begin + len(data))

    def forget(self, team: str) -> None:
        """Forget the team."""
        self._teams.pop(team, None)

    def close(self) -> None:
        """Release nothing: the launcher holds nothing."""


@dataclass
class WorkerStats:
    """The answers that the workers got."""

    sent: int = 0
    failed: int = 0
    seconds: list[float] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)


async def worker(
    port: int, job: int, rank: int, secret: str, every_s: float, ends: float, seen: WorkerStats, step: int = 0
) -> None:
    """Report over one connection, again and again, steps after `step`; a broken one is replaced."""
    await asyncio.sleep(every_s * ((rank * 37 + job * 11) % 1000) / 1000)
    reader: asyncio.StreamReader | None = None
    writer: asyncio.StreamWriter | None = None
    try:
        while time.monotonic() < ends:
            step += 1
            body = json.dumps(report_of(rank, step)).encode()
            head = (
                f"POST /api/jobs/{job}/report HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {secret}\r\n"
                f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            ).encode()
            began = time.perf_counter()
            seen.sent += 1
            try:
                if writer is None:
                    reader, writer = await asyncio.wait_for(asyncio.open_connection("127.0.0.1", port), 10)
                assert reader
                assert writer
                writer.write(head + body)
                answer = await asyncio.wait_for(read_response(reader), 10)
                if not answer.startswith(b"HTTP/1.1 200"):
                    raise OSError(answer[:80])
                seen.seconds.append(time.perf_counter() - began)
                seen.sizes.append(len(head) + len(body) + len(answer))
            except (OSError, TimeoutError, asyncio.IncompleteReadError):
                seen.failed += 1
                if writer:
                    writer.close()
                writer = None
            await asyncio.sleep(max(0.0, every_s - (time.perf_counter() - began)))
    finally:
        if writer:
            writer.close()


def report_of(rank: int, step: int) -> dict[str, object]:
    """Return the report of a worker of a first start."""
    return {
        "protocol": PROTOCOL,
        "generation": 1,
        "rank": rank,
        "state": "training",
        "step": step,
        "samples_per_s": 1234.5,
        "step_s": 0.41,
        "compute_s": 0.35,
        "waiting_s": 0.04,
        "communication_s": 0.02,
        "data_s": 0.002,
        "samples": 64,
        "moved_bytes": 400_000_000,
        "use": {
            "busy": 0.8 + (step * 7 + rank) % 20 / 100,
            "memory_bytes": 60 << 30,
            "memory_total_bytes": 80 << 30,
            "power_w": 600.0 + (step * 13 + rank) % 50,
            "temperature_c": 65.0,
        },
        "traffic": None if rank else {"nic": "eth0", "received_bytes_per_s": 9e8, "sent_bytes_per_s": 9e8},
        "metrics": {"loss": 1.25},
    }


async def read_response(reader: asyncio.StreamReader) -> bytes:
    """Read head and body, by the length that the head has."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
    )
    return head + await reader.readexactly(length)


def measure(workers: int, seconds: float, every: float, database: str) -> dict[str, object]:
    """Run simulated workers against a server, and return the figures."""
    with tempfile.TemporaryDirectory(prefix="mimatrix-load-") as folder:
        return _measure(Path(folder), workers, seconds, every, database)


def _measure(folder: Path, workers: int, seconds: float, every: float, database: str) -> dict[str, object]:
    port = free_port()
    tokens = folder / "tokens"
    tokens.mkdir()
    words = [sys.executable, "-m", "bench.server.load", "host", str(folder / "data"), str(port), str(workers), database]
    process = subprocess.Popen(words, env={**os.environ, "LOAD_TOKENS": str(tokens)}, stderr=subprocess.DEVNULL)
    try:
        secrets = _submit_jobs(folder / "data", port, tokens, workers)
        before, cpu = _memory(process.pid), _processor_s(process.pid)
        seen = WorkerStats()
        began = time.monotonic()
        asyncio.run(_run_workers(port, secrets, workers, every, seconds, seen))
        took = time.monotonic() - began
        after, used = _memory(process.pid), _processor_s(process.pid) - cpu
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)
    ordered = sorted(seen.seconds)
    return {
        "workers": workers,
        "seconds": took,
        "database": "postgresql" if database else "sqlite",
        "reports": seen.sent,
        "lost": seen.failed,
        "reports_per_s": len(ordered) / took,
        "p50_ms": 1e3 * statistics.median(ordered),
        "p99_ms": 1e3 * ordered[int(0.99 * len(ordered))],
        "longest_ms": 1e3 * ordered[-1],
        "bytes_per_report": statistics.mean(seen.sizes),
        "server_processors": used / took,
        "memory_before_mb": before / 1e6,
        "memory_after_mb": after / 1e6,
    }


def free_port() -> int:
    """Return a port that no process listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
    return port


async def _run_workers(
    port: int, secrets: list[str], workers: int, every: float, seconds: float, seen: WorkerStats
) -> None:
    ends = time.monotonic() + seconds
    each = workers // JOBS
    await asyncio.gather(
        *(
            worker(port, job + 1, rank, secret, every, ends, seen)
            for job, secret in enumerate(secrets)
            for rank in range(each)
        )
    )


def _submit_jobs(data: Path, port: int, tokens: Path, workers: int) -> list[str]:
    """Submit the jobs, and wait until all of them run."""
    from hashlib import sha256

    from mimatrix.api.client import Client
    from mimatrix.api.models import Submission

    deadline = time.monotonic() + 60
    while not (data / "token").is_file() or not (data / "address").is_file():
        assert time.monotonic() < deadline, "the server did not come up"
        time.sleep(0.1)
    archive = data / "nothing"
    archive.write_bytes(b"nothing")
    digest = sha256(b"nothing").hexdigest()
    with Client(f"http://127.0.0.1:{port}", (data / "token").read_text().strip()) as client:
        client.upload(digest, archive)
        for number in range(JOBS):
            client.submit(
                Submission(name=f"j{number}", script="x.py", code_archive=digest, devices=str(workers // JOBS))
            )
    names = [tokens / f"job-{number + 1}.1" for number in range(JOBS)]
    while not all(name.is_file() and name.read_text() for name in names):
        assert time.monotonic() < deadline, "the jobs did not start"
        time.sleep(0.1)
    return [name.read_text() for name in names]


def _memory(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _processor_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def host(data: str, port: str, workers: str, database: str) -> None:
    """Run the server."""
    from mimatrix.server import Settings, serve

    nodes = (NodeInfo("standing", "127.0.0.1", (DeviceInfo("cpu", 1 << 30),) * int(workers)),)
    serve(Settings(data=Path(data), port=int(port), database=database), lambda _: FakeLauncher(nodes))


if __name__ == "__main__":
    host(*sys.argv[2:])
