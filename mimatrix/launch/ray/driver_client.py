"""The client of the process that speaks with Ray: calls with a deadline, as JSON over a socket pair."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mimatrix.core.errors import MiMatrixError, WorldError
from mimatrix.launch.ray.messages import decode_raylet, decode_reply, encode_request
from mimatrix.launch.ray.nodes import Raylet

CONNECTED = 0
"""The number of the first result, which no call asked for."""
# To connect, at most; and how long a call waits for it.
_CONNECT_S, _CONNECT_WAIT_S = 40.0, 12.0
_CALL_S = 5.0
# Beyond what the other side allows itself.
_SLACK_S = 5.0
_LONGEST_MESSAGE = 1 << 28
_CODE = Path(__file__).parents[3]


@dataclass(frozen=True, slots=True)
class DriverCall:
    """A call of a method of the driver."""

    number: int
    method: str
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class DriverResult:
    """What came of a call: a value, or why there is none."""

    number: int
    value: Any = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    """A node did what it was asked to."""

    value: Any


@dataclass(frozen=True, slots=True)
class Refused:
    """A node could not do it, and says why."""

    error: MiMatrixError


@dataclass(frozen=True, slots=True)
class Silent:
    """A node did not answer."""

    reason: str


NodeReply = Answer | Refused | Silent


def send(line: Connection, message: DriverCall | DriverResult) -> None:
    """Send a message as JSON: no process runs code because of what another one sends."""
    line.send_bytes(json.dumps(asdict(message)).encode())


def receive(line: Connection) -> dict[str, Any]:
    """Return the fields of the next message."""
    return dict(json.loads(line.recv_bytes(_LONGEST_MESSAGE)))


class DriverClient:
    """Calls to one Ray cluster, by a process that is started when it is needed, and again after it ended."""

    def __init__(self, address: str, namespace: str, environment: Mapping[str, str], log: Path) -> None:
        self._address, self._namespace, self._environment, self._log = address, namespace, environment, log
        self._lock = threading.Lock()
        self._driver: _Driver | None = None

    def raylets(self) -> tuple[Raylet, ...]:
        """Return all nodes that Ray knows, also those that are gone."""
        return tuple(map(decode_raylet, self._call(_CALL_S, "raylets")))

    def ask(
        self,
        calls: Mapping[str, Mapping[str, Any]],
        method: str,
        within_s: float = _CALL_S,
        *,
        archive: Path | None = None,
    ) -> dict[str, NodeReply]:
        """Call a method of the agents on these nodes, all at once.

        Args:
            calls: The arguments for each node, as plain data.
            method: A method of `NodeAgent`.
            within_s: How long to wait for replies.
            archive: A file whose content goes with each call.
        """
        if not calls:
            return {}
        requests = {node: encode_request(method, arguments) for node, arguments in calls.items()}
        replies = self._call(within_s + _SLACK_S, "ask", requests, str(archive or ""), within_s)
        return {node: _node_reply(replies[node]) for node in calls}

    def close(self) -> None:
        """End the process; a call after that starts another one."""
        with self._lock:
            if self._driver:
                self._driver.end()
            self._driver = None

    def _call(self, within_s: float, method: str, *arguments: Any) -> Any:
        driver = self._running()
        driver.wait_to_connect(f"Ray at {self._address} was not reached")
        return driver.wait(driver.send(method, arguments), within_s, f"Ray at {self._address} did not answer")

    def _running(self) -> "_Driver":
        with self._lock:
            try:
                if self._driver is None or self._driver.has_ended:
                    self._driver = _Driver(self._start)
            except OSError as error:
                raise WorldError(f"the process that speaks with Ray cannot be started ({error})") from None
            return self._driver

    def _start(self) -> "tuple[subprocess.Popen[bytes], Connection]":
        ours, theirs = socket.socketpair()
        module = "mimatrix.launch.ray.driver"
        command = [sys.executable, "-m", module, self._address, self._namespace, str(theirs.fileno())]
        self._log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with theirs, open(self._log, "wb", opener=_open_private) as log:
            process = subprocess.Popen(  # noqa: S603 (the command is ours)
                command,
                cwd=_CODE,
                env=dict(self._environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=[theirs.fileno()],
                # Ctrl-C is for the server, which keeps running for a while.
                start_new_session=True,
            )
        return process, Connection(ours.detach())


def _node_reply(reply: Mapping[str, str]) -> NodeReply:
    if "silent" in reply:
        return Silent(reply["silent"])
    value = decode_reply(reply["reply"])
    return Refused(value) if isinstance(value, MiMatrixError) else Answer(value)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


class _Driver:
    """One process, and the calls that wait for it."""

    def __init__(self, start: "Callable[[], tuple[subprocess.Popen[bytes], Connection]]") -> None:
        self.has_ended = False
        self.connected: Future[Any] = Future()
        self._calls: dict[int, Future[Any]] = {CONNECTED: self.connected}
        self._lock = threading.Lock()
        self._number = CONNECTED
        self._began_s = time.monotonic()
        self._process, self._line = start()
        threading.Thread(target=self._listen, name="mimatrix-ray", daemon=True).start()

    def send(self, method: str, arguments: tuple[Any, ...]) -> "Future[Any]":
        """Send a call; its result comes out of the future."""
        call: Future[Any] = Future()
        with self._lock:
            if self.has_ended:
                raise _lost()
            self._number += 1
            self._calls[self._number] = call
            # A broken line has a listener that is about to fail the call.
            with suppress(OSError):
                send(self._line, DriverCall(self._number, method, arguments))
        return call

    def wait_to_connect(self, otherwise: str) -> None:
        """Wait until Ray is connected, for a while: a slow connection may be there at the next call."""
        try:
            self.connected.result(_CONNECT_WAIT_S)
        except TimeoutError:
            if time.monotonic() - self._began_s > _CONNECT_S:
                self.end()
            raise WorldError(
                f"{otherwise} within {_CONNECT_WAIT_S:g} s; see that it runs, also on this machine"
            ) from None

    def wait(self, call: "Future[Any]", within_s: float, otherwise: str) -> Any:
        """Return the result of a call; a process that misses its deadline is of no use any more, and is killed."""
        try:
            return call.result(within_s)
        except TimeoutError:
            self.end()
            raise WorldError(f"{otherwise} within {within_s:g} s; see that it runs, also on this machine") from None

    def end(self) -> None:
        """Kill the process, and wait for that. Calls that wait fail."""
        self._process.kill()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_SLACK_S)

    def _listen(self) -> None:
        with suppress(EOFError, OSError, ValueError, TypeError):
            while True:
                result = DriverResult(**receive(self._line))
                self._settle(result.number, WorldError(result.error) if result.error else result.value)
        with self._lock:
            self.has_ended = True
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
