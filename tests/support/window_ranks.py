"""A rank of the windows' contract, in this process or another. Arguments and results are plain JSON.

It reads lines of `[kind, action, arguments]` and answers `{"done": ...}` or `{"raised": ..., "said": ...}`.
"""

import hashlib
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from mimatrix.comm.memory.base import PeerWindow, Window, WindowKind
from mimatrix.comm.memory.cuda_ipc import CudaIpcWindows
from mimatrix.comm.memory.memfd import MemfdWindows
from mimatrix.comm.memory.nixl import NixlPeer, NixlWindows, PendingRead
from mimatrix.core import errors

ANSWER_S = 20.0
READ_S = 3.0
KINDS: dict[str, Callable[[], WindowKind]] = {
    "mapped": MemfdWindows,
    "nixl": lambda: NixlWindows(READ_S),
    "cuda_ipc": lambda: CudaIpcWindows(torch.device("cuda")),
}


class WindowRank(Protocol):
    """A rank that performs actions on windows."""

    def do(self, action: str, *arguments: object) -> Any: ...


class InProcessRank:
    """A rank in this process."""

    def __init__(self, kind: WindowKind) -> None:
        self._kind = kind
        self._windows: dict[int, Window] = {}
        self._peers: dict[int, PeerWindow] = {}
        self._views: dict[int, torch.Tensor] = {}
        self._pending: PendingRead | None = None
        self._count = 0

    def do(self, action: str, *arguments: object) -> Any:
        return getattr(self, action)(*arguments)

    def allocate(self, size: int) -> int:
        self._count += 1
        self._windows[self._count] = self._kind.allocate(size)
        return self._count

    def shape(self, window: int) -> list[object]:
        memory = self._windows[window].bytes
        return [str(memory.dtype), list(memory.shape), bool(memory.any())]

    def handle(self, window: int) -> str:
        return self._windows[window].handle()

    def write(self, window: int, at: int, content: str) -> None:
        raw = torch.frombuffer(bytearray.fromhex(content), dtype=torch.uint8)
        self._windows[window].bytes[at : at + len(raw)] = raw

    def fill(self, window: int, seed: int) -> str:
        memory = self._windows[window].bytes
        memory.copy_(torch.randint(255, memory.shape, generator=torch.Generator().manual_seed(seed)))
        return _digest(memory)

    def withdraw(self, window: int) -> None:
        self._windows.pop(window).close()

    def open(self, handle: str) -> int:
        self._count += 1
        self._peers[self._count] = self._kind.open(handle)
        return self._count

    def read(self, peer: int, start: int, stop: int) -> str:
        into = torch.full((max(stop - start, 0),), 0xEE, dtype=torch.uint8)
        self._peers[peer].read(start, stop, into)
        return into.numpy().tobytes().hex()

    def digest(self, peer: int, start: int, stop: int, window: int = 0) -> str:
        """Return a digest of what is read into a window of this rank, or into other memory."""
        into = self._windows[window].bytes[: stop - start] if window else torch.empty(stop - start, dtype=torch.uint8)
        self._peers[peer].read(start, stop, into)
        return _digest(into)

    def digest_in_pieces(self, peer: int, size: int, pieces: int, window: int = 0) -> str:
        """Read all pieces at once, wait for the last one first, and return a digest."""
        into = self._windows[window].bytes[:size] if window else torch.empty(size, dtype=torch.uint8)
        ends = [size * piece // pieces for piece in range(pieces + 1)]
        reads = [self._nixl(peer).start_read(start, stop, into[start:stop]) for start, stop in pairwise(ends)]
        for read in reversed(reads):
            read.wait(time.monotonic() + READ_S)
        return _digest(into)

    def start(self, peer: int, start: int, stop: int) -> None:
        self._pending = self._nixl(peer).start_read(start, stop, torch.empty(stop - start, dtype=torch.uint8))

    def wait(self, seconds: float) -> None:
        assert self._pending
        self._pending.wait(time.monotonic() + seconds)

    def hold(self, peer: int, start: int, stop: int) -> bool:
        """Keep a view; return whether the window has one."""
        view = self._peers[peer].view(start, stop)
        if view is not None:
            self._views[peer] = view
        return view is not None

    def held(self, peer: int) -> str:
        return self._views[peer].cpu().numpy().tobytes().hex()

    def close(self, peer: int) -> None:
        self._views.pop(peer, None)
        self._peers.pop(peer).close()

    def open_and_close(self, handle: str, times: int) -> list[int]:
        """Return how many descriptors are open before and after."""
        return self._counted(lambda: self._visit(handle), times)

    def allocate_and_withdraw(self, times: int) -> list[int]:
        return self._counted(lambda: self.withdraw(self.allocate(8192)), times)

    def resident(self) -> int:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def in_shm(self) -> list[str]:
        """Return the files of /dev/shm that this process has mapped or open."""
        mapped = [line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
        return [path for path in [*mapped, *_descriptors()] if path.startswith("/dev/shm")]

    def busy_s(self, seconds: float) -> float:
        """Return the CPU time that an idle process takes."""
        before = time.process_time()
        time.sleep(seconds)
        return time.process_time() - before

    def _visit(self, handle: str) -> None:
        peer = self._kind.open(handle)
        peer.read(0, 16, torch.empty(16, dtype=torch.uint8))
        peer.close()

    def _counted(self, action: Callable[[], None], times: int) -> list[int]:
        action()
        before = len(_descriptors())
        for _ in range(times):
            action()
        return [before, len(_descriptors())]

    def _nixl(self, peer: int) -> NixlPeer:
        window = self._peers[peer]
        assert isinstance(window, NixlPeer)
        return window


class RankProcess:
    """A process that runs this file, within `prefix` (as in `ip netns exec x`)."""

    def __init__(self, prefix: Sequence[str] = ()) -> None:
        # Only TCP: it is the transport that every machine has, and the one where the owner's process must answer.
        environment = {**os.environ, "UCX_TLS": "tcp", "NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal"}
        self.process = subprocess.Popen(
            [*prefix, sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        self._rest = b""

    def tell(self, kind: str, action: str, *arguments: object) -> None:
        assert self.process.stdin
        self.process.stdin.write(json.dumps([kind, action, arguments]).encode() + b"\n")
        self.process.stdin.flush()

    def ask(self, kind: str, action: str, *arguments: object) -> Any:
        self.tell(kind, action, *arguments)
        answer = json.loads(self._line(time.monotonic() + ANSWER_S))
        if "raised" in answer:
            raise cast(type[Exception], getattr(errors, answer["raised"], AssertionError))(answer["said"])
        return answer["done"]

    def end(self) -> None:
        """Let it finish; kill it if it does not."""
        with self.process as process:
            assert process.stdin
            process.stdin.close()
            try:
                process.wait(ANSWER_S)
            finally:
                process.kill()

    def _line(self, deadline: float) -> bytes:
        assert self.process.stdout
        source = self.process.stdout.fileno()
        while b"\n" not in self._rest:
            patience = max(0.0, deadline - time.monotonic())
            heard = os.read(source, 1 << 20) if select.select([source], [], [], patience)[0] else None
            assert heard is not None, f"no answer in {ANSWER_S} s"
            assert heard, f"the other process ended with {self.process.wait(ANSWER_S)}"
            self._rest += heard
        line, self._rest = self._rest.split(b"\n", 1)
        return line


class ProcessRank:
    """A rank in another process."""

    def __init__(self, program: RankProcess, kind: str) -> None:
        self._program, self._kind = program, kind

    def do(self, action: str, *arguments: object) -> Any:
        return self._program.ask(self._kind, action, *arguments)


def _digest(memory: torch.Tensor) -> str:
    return hashlib.sha256(memory.cpu().numpy().data).hexdigest()


def _descriptors() -> list[str]:
    found = []
    for link in Path("/proc/self/fd").iterdir():
        try:
            found.append(str(link.readlink()))
        except FileNotFoundError:
            continue
    return found


def _serve() -> None:
    # Answers go where stdout went; whatever else prints goes to stderr.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(1)
    ranks: dict[str, InProcessRank] = {}
    for line in sys.stdin:
        kind, action, arguments = json.loads(line)
        if kind not in ranks:
            ranks[kind] = InProcessRank(KINDS[kind]())
        try:
            answer = {"done": ranks[kind].do(action, *arguments)}
        except Exception as error:  # noqa: BLE001 (whatever it is, the test is told)
            answer = {"raised": type(error).__name__, "said": str(error)}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    _serve()
