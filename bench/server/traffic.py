"""The bytes on the server's sockets while a small and a large model train.

All connections of workers go through a relay that counts bytes; no other process has its address.
"""

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from mimatrix.api.client import Client
from mimatrix.api.models import ENDED, JobState

SECONDS = 40.0
RANKS = 2
WIDTHS = {"1 MB": 500, "400 MB": 10_000}
SCRIPT = """
import sys, time, torch, mimatrix
width, seconds = int(sys.argv[1]), float(sys.argv[2])
torch.manual_seed(0)
rows = torch.randn(64, width)
model = torch.nn.Linear(width, width, bias=False)
run = mimatrix.init(global_batch=4, quiet=True)
model, optimizer, loader = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-4), list(rows))
late = time.monotonic() + seconds
for epoch in run.epochs(1 << 30):
    for batch in loader:
        loss = model(batch).square().mean()
        run.backward(loss)
        run.log(loss=loss)
        optimizer.step()
        optimizer.zero_grad()
    if run.evaluate(model, [torch.tensor(time.monotonic())], lambda _, clock: {"now": clock.max()})["now"] > late:
        break
"""


@dataclass
class Relay:
    """Passes connections on to a port, and counts."""

    target: int
    port: int = 0
    bytes: int = 0
    requests: int = 0
    _ready: threading.Event = field(default_factory=threading.Event)

    def start(self) -> "Relay":
        """Serve in a thread."""
        threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True).start()
        assert self._ready.wait(10)
        return self

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await server.serve_forever()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self.target)
        await asyncio.gather(self._pump(reader, far_writer, counts=True), self._pump(far_reader, writer))

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, counts: bool = False) -> None:
        while data := await reader.read(65_536):
            self.bytes += len(data)
            self.requests += data.count(b"/report HTTP/1.1") if counts else 0
            writer.write(data)
            await writer.drain()
        writer.close()


def measure() -> list[dict[str, object]]:
    """Train both models, one after the other, on one server."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    relay = Relay(port).start()
    with tempfile.TemporaryDirectory(prefix="mimatrix-traffic-") as folder:
        data, script = Path(folder) / "data", Path(folder) / "code" / "model.py"
        script.parent.mkdir()
        script.write_text(SCRIPT)
        words = [
            sys.executable,
            "-m",
            "mimatrix.cli.main",
            "up",
            "--data",
            str(data),
            "--port",
            str(port),
            "--devices",
            str(RANKS),
        ]
        words += ["--advertise", f"http://127.0.0.1:{relay.port}"]
        process = subprocess.Popen(words, stderr=subprocess.DEVNULL)
        try:
            rows = [_row(name, width, data, port, script, relay, process.pid) for name, width in WIDTHS.items()]
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=30)
    return rows


def _row(name: str, width: int, data: Path, port: int, script: Path, relay: Relay, pid: int) -> dict[str, object]:
    while not (data / "token").is_file() or not (data / "address").is_file():
        time.sleep(0.1)
    environment = {
        **os.environ,
        "MIMATRIX_SERVER": f"http://127.0.0.1:{port}",
        "MIMATRIX_TOKEN": (data / "token").read_text().strip(),
    }
    words = [
        sys.executable,
        "-m",
        "mimatrix.cli.main",
        "submit",
        "--devices",
        str(RANKS),
        "--json",
        str(script),
        "--",
        str(width),
        str(SECONDS),
    ]
    number = int(
        json.loads(subprocess.run(words, env=environment, capture_output=True, check=True, timeout=60).stdout)["id"]
    )
    with Client(environment["MIMATRIX_SERVER"], environment["MIMATRIX_TOKEN"]) as client:
        while (job := client.job(number)).state not in ENDED and job.progress.step < 1:
            time.sleep(0.1)
        began, taken, asked = time.monotonic(), relay.bytes, relay.requests
        while (job := client.job(number)).state is JobState.TRAINING and time.monotonic() - began < SECONDS - 5:
            time.sleep(0.2)
        took, taken, asked = time.monotonic() - began, relay.bytes - taken, relay.requests - asked
        memory = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        while (job := client.job(number)).state not in ENDED:
            time.sleep(0.2)
    assert job.state is JobState.DONE, job.reason
    return {
        "model": name,
        "seconds": took,
        "reports": asked,
        "bytes_per_report": taken / max(1, asked),
        "bytes_per_s_and_worker": taken / took / RANKS,
        "server_memory_mb": memory / 1e6,
        "steps": job.progress.step,
    }
