"""What goes over a stream between groups and shards: a small head in JSON, then numbers as they lie in memory."""

import json
import socket
import struct
from contextlib import suppress
from typing import Any

import torch

from mimatrix.core.errors import WorldError

_SIZES = struct.Struct("!4sIQ")
_MAGIC = b"MMH1"
_MOST_HEAD, _MOST_BODY = 1 << 20, 1 << 40
Head = dict[str, Any]


class Stream:
    """One connection. Whoever waits on it has a deadline."""

    def __init__(self, raw: socket.socket, timeout_s: float) -> None:
        self._raw = raw
        raw.settimeout(timeout_s)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, head: Head, values: torch.Tensor | None = None) -> None:
        """A head, and numbers with it or none."""
        body = b"" if values is None else _bytes_of(values)
        text = json.dumps(head | ({} if values is None else {"dtype": str(values.dtype)})).encode()
        self._raw.sendall(_SIZES.pack(_MAGIC, len(text), len(body)) + text)
        if body:
            self._raw.sendall(body)

    def receive(self) -> tuple[Head, torch.Tensor | None]:
        """The next; raises `ConnectionError` where the other one is gone."""
        magic, head_bytes, body_bytes = _SIZES.unpack(self._exactly(_SIZES.size))
        if magic != _MAGIC or head_bytes > _MOST_HEAD or body_bytes > _MOST_BODY:
            raise WorldError(
                "what came over the stream is no message of groups; is there another program at the address?"
            )
        head: Head = json.loads(bytes(self._exactly(head_bytes)))
        if not body_bytes:
            return head, None
        dtype = getattr(torch, head["dtype"].removeprefix("torch."))
        return head, torch.frombuffer(self._exactly(body_bytes), dtype=dtype)

    def close(self) -> None:
        """No more."""
        with suppress(OSError):
            self._raw.shutdown(socket.SHUT_RDWR)
        self._raw.close()

    def _exactly(self, count: int) -> bytearray:
        found = bytearray(count)
        view, done = memoryview(found), 0
        while done < count:
            got = self._raw.recv_into(view[done:])
            if not got:
                raise ConnectionError("the stream was closed")
            done += got
        return found


def _bytes_of(values: torch.Tensor) -> memoryview:
    flat = values.detach().contiguous().view(-1).view(torch.uint8)
    return flat.numpy().data
