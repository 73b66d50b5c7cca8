"""What goes over a stream between groups and shards: a small head in JSON, then numbers as they lie in memory.

On one host numbers do not go over the stream: they are laid into a window of whoever sends, and the other one takes
them from there. Both ask and answer in turn, so a window is not written again before it has been read.
"""

import json
import socket
import struct
from contextlib import suppress
from functools import lru_cache
from typing import Any

import torch

from mimatrix.comm.endpoint import own_host
from mimatrix.comm.windows.mapped import MappedWindow, MappedWindows
from mimatrix.comm.windows.viewed import ViewedPeer
from mimatrix.core.errors import WorldError

_SIZES = struct.Struct("!4sIQ")
_MAGIC = b"MMH1"
_MOST_HEAD, _MOST_BODY = 1 << 20, 1 << 40
_LEAST_LAID = 1 << 15
"""Fewer bytes are as quick over the stream."""
Head = dict[str, Any]


class Stream:
    """One connection. Whoever waits on it has a deadline."""

    def __init__(self, raw: socket.socket, timeout_s: float) -> None:
        self._raw = raw
        raw.settimeout(timeout_s)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._is_near = False
        self._mine: MappedWindow | None = None
        self._theirs: tuple[str, ViewedPeer] | None = None

    def meet(self, host: str) -> None:
        """The other one is there: where both share memory, numbers go through it from now on."""
        self._is_near = host == own_host()

    def send(self, head: Head, values: torch.Tensor | None = None) -> None:
        """A head, and numbers with it or none."""
        body: bytes | memoryview = b""
        if values is not None:
            head = head | {"dtype": str(values.dtype)}
            size = values.numel() * values.element_size()
            if self._is_near and size >= _LEAST_LAID:
                head |= {"laid": [self._lay(values, size), size]}
            else:
                body = _bytes_of(values)
        text = json.dumps(head).encode()
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
        if not body_bytes and "laid" not in head:
            return head, None
        dtype = getattr(torch, head["dtype"].removeprefix("torch."))
        if body_bytes:
            return head, torch.frombuffer(self._exactly(body_bytes), dtype=dtype)
        return head, self._taken(*head.pop("laid")).view(dtype)

    def close(self) -> None:
        """No more."""
        with suppress(OSError):
            self._raw.shutdown(socket.SHUT_RDWR)
        self._raw.close()
        if self._mine:
            self._mine.close()
        if self._theirs:
            self._theirs[1].close()

    def _lay(self, values: torch.Tensor, size: int) -> str:
        """Put numbers into the window; its handle."""
        if self._mine is None or len(self._mine.bytes) < size:
            if self._mine:
                self._mine.close()
            self._mine = _windows().allocate(size)
        self._mine.bytes[:size].copy_(values.detach().contiguous().view(-1).view(torch.uint8))
        return self._mine.handle()

    def _taken(self, handle: str, size: int) -> torch.Tensor:
        """A copy of what the other one laid."""
        if self._theirs is None or self._theirs[0] != handle:
            if self._theirs:
                self._theirs[1].close()
            self._theirs = handle, _windows().open(handle)
        return self._theirs[1].view(0, size).clone()

    def _exactly(self, count: int) -> bytearray:
        found = bytearray(count)
        view, done = memoryview(found), 0
        while done < count:
            got = self._raw.recv_into(view[done:])
            if not got:
                raise ConnectionError("the stream was closed")
            done += got
        return found


@lru_cache
def _windows() -> MappedWindows:
    """One door for all streams of this process."""
    return MappedWindows()


def _bytes_of(values: torch.Tensor) -> memoryview:
    flat = values.detach().contiguous().view(-1).view(torch.uint8)
    return flat.numpy().data
