"""The line to a process that speaks with Ray: what is asked, what is told, and a deadline for everything."""

import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mimatrix.core.errors import MiMatrixError, WorldError
from mimatrix.launch.ray.nodes import Raylet

CONNECTED = 0
"""The number of what is told first, and unasked."""
# To connect, at most; and how long a call waits for it.
_CONNECTED_S, _PATIENCE_S = 40.0, 12.0
_TOLD_S = 5.0
# Beyond what the other side allows itself.
_SLACK_S = 5.0
_CODE = Path(__file__).parents[3]


@dataclass(frozen=True, slots=True)
class Ask:
    """A call of a method of the driver."""

    number: int
    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Told:
    """What came of it: a value, or a `MiMatrixError` to raise."""

    number: int
    value: Any


@dataclass(frozen=True, slots=True)
class Archive:
    """An argument that stands for the content of a file, which Ray carries."""

    path: Path


@dataclass(frozen=True, slots=True)
class Answer:
    """A node did what it was asked to."""

    value: Any


@dataclass(frozen=True, slots=True)
class Refused:
    """A node could not, and says why."""

    error: MiMatrixError


@dataclass(frozen=True, slots=True)
class Silent:
    """A node did not answer."""

    reason: str


Reply = Answer | Refused | Silent


class Line:
    """To one Ray cluster, by a process that is started when it is needed, and again after it ended."""

    def __init__(self, address: str, place: str, environment: Mapping[str, str], log: Path) -> None:
        self._address, self._place, self._environment, self._log = address, place, environment, log
        self._lock = threading.Lock()
        self._talk: _Talk | None = None

    def raylets(self) -> tuple[Raylet, ...]:
        """All that Ray knows of, also those that are gone."""
        found: tuple[Raylet, ...] = self._call(_TOLD_S, "raylets")
        return found

    def ask(self, calls: Mapping[str, tuple[Any, ...]], method: str, within_s: float = _TOLD_S) -> dict[str, Reply]:
        """Call a method of the keepers on these nodes, all at once, with the arguments of each."""
        if not calls:
            return {}
        replies: dict[str, Reply] = self._call(within_s + _SLACK_S, "ask", dict(calls), method, within_s)
        return replies

    def close(self) -> None:
        """End the process; a call after that starts another one."""
        with self._lock:
            if self._talk:
                self._talk.end()
            self._talk = None

    def _call(self, within_s: float, method: str, *arguments: Any) -> Any:
        talk = self._talking()
        talk.wait_to_connect(f"Ray at {self._address} was not reached")
        return talk.wait(talk.send(method, arguments), within_s, f"Ray at {self._address} did not answer")

    def _talking(self) -> "_Talk":
        with self._lock:
            try:
                if self._talk is None or self._talk.is_over:
                    self._talk = _Talk(self._start)
            except OSError as error:
                raise WorldError(f"what speaks with Ray cannot be started ({error})") from None
            return self._talk

    def _start(self) -> "tuple[subprocess.Popen[bytes], Connection]":
        ours, theirs = socket.socketpair()
        words = [sys.executable, "-m", "mimatrix.launch.ray.driver", self._address, self._place, str(theirs.fileno())]
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with theirs, self._log.open("wb") as log:
            process = subprocess.Popen(  # noqa: S603 (the words are ours)
                words,
                cwd=_CODE,
                env=dict(self._environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                # Ctrl-C is for the server, which goes on for a while.
                start_new_session=True,
            )
        return process, Connection(ours.detach())


class _Talk:
    """One process, and the calls that wait for it."""

    def __init__(self, start: "Callable[[], tuple[subprocess.Popen[bytes], Connection]]") -> None:
        self.is_over = False
        self.connected: Future[Any] = Future()
        self._calls: dict[int, Future[Any]] = {CONNECTED: self.connected}
        self._lock = threading.Lock()
        self._number = CONNECTED
        self._began_s = time.monotonic()
        self._process, self._line = start()
        threading.Thread(target=self._listen, name="mimatrix-ray", daemon=True).start()

    def send(self, method: str, arguments: tuple[Any, ...]) -> "Future[Any]":
        """Ask; what is told comes out of the future."""
        call: Future[Any] = Future()
        with self._lock:
            if self.is_over:
                raise _lost()
            self._number += 1
            self._calls[self._number] = call
            # A line that is broken has a listener that is about to say so.
            with suppress(OSError):
                self._line.send(Ask(self._number, method, arguments))
        return call

    def wait_to_connect(self, otherwise: str) -> None:
        """Until there is a connection, for a while: one that takes long may be there at the next call."""
        try:
            self.connected.result(_PATIENCE_S)
        except TimeoutError:
            if time.monotonic() - self._began_s > _CONNECTED_S:
                self.end()
            raise WorldError(f"{otherwise} within {_PATIENCE_S:g} s; see that it runs, also on this machine") from None

    def wait(self, call: "Future[Any]", within_s: float, otherwise: str) -> Any:
        """What is told; a process that lets its deadline pass is of no use any more, and is killed."""
        try:
            return call.result(within_s)
        except TimeoutError:
            self.end()
            raise WorldError(f"{otherwise} within {within_s:g} s; see that it runs, also on this machine") from None

    def end(self) -> None:
        """Kill the process, and wait for that. What waits is told."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_SLACK_S)

    def _listen(self) -> None:
        with suppress(EOFError, OSError):
            while True:
                told: Told = self._line.recv()
                self._settle(told.number, told.value)
        with self._lock:
            self.is_over = True
            self._line.close()
        self._process.wait()
        for number in list(self._calls):
            self._settle(number, _lost())

    def _settle(self, number: int, value: Any) -> None:
        with self._lock:
            call = self._calls.pop(number, None)
        if call is None:
            return
        if isinstance(value, MiMatrixError):
            call.set_exception(value)
        else:
            call.set_result(value)


def _lost() -> WorldError:
    return WorldError("the connection to Ray was lost; it is made again with the next call")
