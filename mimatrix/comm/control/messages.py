"""Control messages between ranks and the coordinator: framed, checksummed JSON of one generation. No pickle.

A connection begins with a greeting of a fixed length that shows the job's token. Nothing else is read, and no JSON is
parsed, before that has been compared.
"""

import hashlib
import hmac
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any
from weakref import WeakSet

from mimatrix.comm.control.liveness import watch_host
from mimatrix.core import environment
from mimatrix.core.errors import WorldError
from mimatrix.core.framing import FrameDecoder, FrameFormat

_FRAMES = FrameFormat(b"MMX3")
_GREETING = b"MMG3"
GREETING_BYTES = len(_GREETING) + hashlib.sha256().digest_size
_POST_S = 0.05
"""How long a message that may be dropped waits for another thread that is sending."""


class MessageType(IntEnum):
    """What a message is about."""

    HELLO = 1
    ARRIVE = 2
    GO = 3
    LATE = 4
    PROBE = 5
    STATE = 6
    LOST = 7
    FAULT = 8
    BYE = 9
    BLOCKED = 10
    CALLS = 11
    STORE = 12
    REPLY = 13
    LOAD = 14


_TYPES = frozenset(MessageType)


@dataclass(frozen=True, slots=True)
class ControlMessage:
    """One control message. `generation` is the membership that it belongs to."""

    type: MessageType
    generation: int
    body: dict[str, Any] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Return the bytes to send."""
        return _FRAMES.pack({"type": self.type, "generation": self.generation, "body": self.body})

    @classmethod
    def decode(cls, header: dict[str, Any]) -> "ControlMessage":
        """Return the message that a frame's header carries.

        Raises:
            WorldError: The header lacks a field, or has one of the wrong type.
        """
        match header:
            case {"type": int(code), "generation": int(generation), "body": dict(body)} if code in _TYPES:
                return cls(MessageType(code), generation, body)
        raise WorldError("a control message is corrupt: its fields are not those of a message; check who sent it")


def greeting(token: str, generation: int) -> bytes:
    """Return the first bytes of a rank's connection, `GREETING_BYTES` long; they do not reveal the token."""
    key = hmac.digest(token.encode(), f"mimatrix control, generation {generation}".encode(), "sha256")
    return _GREETING + key


class Decoder:
    """Turns bytes as they arrive into messages of one generation."""

    def __init__(self, generation: int) -> None:
        self._generation, self._frames = generation, FrameDecoder(_FRAMES)

    def feed(self, data: bytes) -> Iterator[ControlMessage]:
        """Append `data` and yield the messages that are now complete.

        Raises:
            WorldError: A message is corrupt, too long, or of another generation; close the connection.
        """
        for header in self._frames.feed(data):
            message = ControlMessage.decode(header)
            if message.generation != self._generation:
                raise WorldError(
                    f"a control message is of generation {message.generation}, and this is generation "
                    f"{self._generation}; restart the process that sent it"
                )
            yield message


class FrameSender:
    """Sends whole frames from several threads; `post` does not wait for a coordinator that has stopped reading."""

    def __init__(self, stream: socket.socket) -> None:
        self._stream, self._lock = stream, threading.Lock()
        self._rest = b""
        """The rest of a frame that the stream did not take: it has to be sent before any other."""
        _senders.add(self)

    def send(self, frame: bytes) -> None:
        """Send a frame; wait until the stream has taken all of it."""
        with self._lock:
            rest, self._rest = self._rest, b""
            self._stream.sendall(rest + frame)

    def post(self, frame: bytes) -> bool:
        """Send a frame if the stream takes it now, and return whether it does; otherwise drop it."""
        if not self._lock.acquire(timeout=_POST_S):
            return False
        try:
            self._flush()
            if self._rest:
                return False
            self._rest = frame
            self._flush()
            return True
        finally:
            self._lock.release()

    def _flush(self) -> None:
        with suppress(BlockingIOError):
            while self._rest:
                self._rest = self._rest[self._stream.send(self._rest, socket.MSG_DONTWAIT) :]

    def reset_lock(self) -> None:
        """Replace the lock in a forked child: the thread that held it does not exist there."""
        self._lock = threading.Lock()


_streams: "WeakSet[socket.socket]" = WeakSet()
_senders: "WeakSet[FrameSender]" = WeakSet()


def close_in_children(stream: socket.socket) -> socket.socket:
    """Have forked children, such as data loader workers, close a socket: they would keep it open after a crash."""
    _streams.add(stream)
    return stream


def _close_streams() -> None:
    for stream in list(_streams):
        with suppress(OSError):
            os.close(stream.detach())
    for sender in list(_senders):
        sender.reset_lock()


os.register_at_fork(after_in_child=_close_streams)


def connect(address: str, port: int, timeout_s: float, silence_s: float) -> socket.socket:
    """Return a connection to a coordinator: no delay for small messages, and it breaks if the host falls silent."""
    try:
        stream = socket.create_connection((address, port), timeout=timeout_s)
    except OSError as error:
        raise WorldError(
            f"the coordinator at {address} port {port} cannot be reached: {error}; "
            f"set {environment.ADDRESS.name} on rank 0 to an address that all ranks reach"
        ) from error
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    watch_host(stream, silence_s)
    return close_in_children(stream)
