"""Control messages on a stream: framed, checked, of one generation. Small JSON, no pickle."""

import json
import os
import socket
import struct
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any
from weakref import WeakSet

from mimatrix.core.errors import WorldError

_HEAD = struct.Struct("!4sBIII")
_MAGIC = b"MMX1"
MOST_BYTES = 1 << 20
LEFT = "it left"
"""Why a rank is gone that said goodbye."""


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


@dataclass(frozen=True, slots=True)
class ControlMessage:
    """One control message. `generation` is the membership that it belongs to."""

    kind: MessageType
    generation: int
    body: dict[str, Any] = field(default_factory=dict)

    def frame(self) -> bytes:
        """Its bytes on the wire."""
        body = json.dumps(self.body, separators=(",", ":")).encode()
        if len(body) > MOST_BYTES:
            raise WorldError(f"a control message of {len(body)} bytes is too long; {MOST_BYTES} is the most")
        check = zlib.crc32(body, (self.kind << 24) ^ self.generation)
        return _HEAD.pack(_MAGIC, self.kind, self.generation, len(body), check) + body


class Decoder:
    """Bytes in, messages out. Whatever is corrupt, too long or of another generation raises."""

    def __init__(self, generation: int) -> None:
        self._generation, self._bytes = generation, bytearray()

    def feed(self, data: bytes) -> Iterator[ControlMessage]:
        """Take what has arrived; give the messages that are complete."""
        self._bytes += data
        while len(self._bytes) >= _HEAD.size:
            magic, kind, generation, length, check = _HEAD.unpack_from(self._bytes)
            if magic != _MAGIC or length > MOST_BYTES or kind not in MessageType.__members__.values():
                raise WorldError("a control message is corrupt: it does not start as one; the connection is closed")
            if generation != self._generation:
                raise WorldError(
                    f"a control message is of generation {generation}, and this is generation {self._generation}; "
                    "it is refused"
                )
            if len(self._bytes) < _HEAD.size + length:
                return
            body = bytes(self._bytes[_HEAD.size : _HEAD.size + length])
            if zlib.crc32(body, (kind << 24) ^ generation) != check:
                raise WorldError("a control message is corrupt: its checksum differs; the connection is closed")
            del self._bytes[: _HEAD.size + length]
            yield ControlMessage(MessageType(kind), generation, json.loads(body))


_open: "WeakSet[socket.socket]" = WeakSet()


def close_in_children(stream: socket.socket) -> socket.socket:
    """Have forked children (loaders of data) let go of a socket: else it would seem alive when this process is dead."""
    _open.add(stream)
    return stream


def _in_child() -> None:
    for stream in list(_open):
        with suppress(OSError):
            os.close(stream.detach())


os.register_at_fork(after_in_child=_in_child)


def connected(address: str, port: int, timeout_s: float) -> socket.socket:
    """A stream to a coordinator, without delay for small messages."""
    try:
        stream = socket.create_connection((address, port), timeout=timeout_s)
    except OSError as error:
        raise WorldError(
            f"the coordinator at {address} port {port} cannot be reached: {error}; "
            "set MIMATRIX_ADDRESS on rank 0 to an address that all ranks reach"
        ) from error
    stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return close_in_children(stream)
