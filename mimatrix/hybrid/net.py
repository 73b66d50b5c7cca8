"""What goes over a stream between groups and shards: a small head in JSON, then numbers as they lie in memory.

On one host, and between hosts with RDMA, numbers do not go over the stream: they are laid into a window of whoever
sends, and the other one takes them from there. Both ask and answer in turn, so a window is not written again before it
has been read.
"""

import json
import os
import socket
import struct
import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from mimatrix.comm.endpoint import own_host
from mimatrix.comm.memory import PeerWindow, Window, WindowKind
from mimatrix.comm.memory.memfd import MemfdWindows
from mimatrix.comm.memory.nixl import NixlWindows, nixl_available
from mimatrix.core.errors import WorldError

_SIZES = struct.Struct("!4sIQ")
_MAGIC = b"MMH1"
_MOST_HEAD, _MOST_BODY = 1 << 20, 1 << 40
_LEAST_LAID = 1 << 15
"""Fewer bytes are as quick over the stream."""
_RDMA_DEVICES = Path("/sys/class/infiniband")
Header = dict[str, Any]


def local_capabilities() -> Header:
    """What the other end of a stream has to know of this one."""
    return {"host": own_host(), "rdma": has_rdma()}


def has_rdma() -> bool:
    """Whether other hosts can read this one's memory through its NIC. `MIMATRIX_RDMA=0` or `1` says so instead."""
    given = os.environ.get("MIMATRIX_RDMA", "")
    if given in ("0", "1"):
        return given == "1" and nixl_available()
    return _RDMA_DEVICES.is_dir() and any(_RDMA_DEVICES.iterdir()) and nixl_available()


@dataclass(frozen=True, slots=True)
class Address:
    """Where a service listens."""

    address: str
    port: int

    def to_json(self) -> list[str | int]:
        """For a head."""
        return [self.address, self.port]


class Connection:
    """One connection. Whoever asks on it has a deadline; one that serves has none, and notices who is gone."""

    def __init__(self, raw: socket.socket, timeout_s: float) -> None:
        self._raw = raw
        raw.settimeout(timeout_s)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3)):
            raw.setsockopt(socket.IPPROTO_TCP, option, value)
        self._is_closed, self._lock = False, threading.Lock()
        self._through: WindowKind | None = None
        self._mine: Window | None = None
        self._theirs: tuple[str, PeerWindow] | None = None

    def meet(self, other: Header) -> None:
        """The other one has told of its side: where both share memory or RDMA, numbers go through it from now on."""
        mine = local_capabilities()
        if other.get("host") == mine["host"]:
            self._through = _mapped_windows()
        elif other.get("rdma") and mine["rdma"]:
            self._through = _far_windows()

    def serve(self) -> None:
        """From now on wait as long as the other one computes; a host that is gone is noticed all the same."""
        self._raw.settimeout(None)

    def send(self, head: Header, values: torch.Tensor | None = None) -> None:
        """A head, and numbers with it or none."""
        body: bytes | memoryview = b""
        if values is not None:
            head = head | {"dtype": str(values.dtype)}
            size = values.numel() * values.element_size()
            if self._through and size >= _LEAST_LAID:
                head |= {"laid": [self._lay(self._through, values, size), size]}
            else:
                body = _bytes_of(values)
        text = json.dumps(head).encode()
        self._raw.sendall(_SIZES.pack(_MAGIC, len(text), len(body)) + text)
        if body:
            self._raw.sendall(body)

    def receive(self) -> tuple[Header, torch.Tensor | None]:
        """The next; raises `ConnectionError` where the other one is gone."""
        magic, head_bytes, body_bytes = _SIZES.unpack(self._exactly(_SIZES.size))
        if magic != _MAGIC or head_bytes > _MOST_HEAD or body_bytes > _MOST_BODY:
            raise WorldError(
                "what came over the stream is no message of groups; is there another program at the address?"
            )
        head: Header = json.loads(bytes(self._exactly(head_bytes)))
        if not body_bytes and "laid" not in head:
            return head, None
        dtype = getattr(torch, head["dtype"].removeprefix("torch."))
        if body_bytes:
            return head, torch.frombuffer(self._exactly(body_bytes), dtype=dtype)
        return head, self._taken(*head.pop("laid")).view(dtype)

    def close(self) -> None:
        """No more; whoever serves it and whoever ends the service may both say so."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        with suppress(OSError):
            self._raw.shutdown(socket.SHUT_RDWR)
        self._raw.close()
        if self._mine:
            self._mine.close()
        if self._theirs:
            self._theirs[1].close()

    def _lay(self, through: WindowKind, values: torch.Tensor, size: int) -> str:
        """Put numbers into the window; its handle."""
        if self._mine is None or len(self._mine.bytes) < size:
            if self._mine:
                self._mine.close()
            self._mine = through.allocate(size)
        self._mine.bytes[:size].copy_(values.detach().contiguous().view(-1).view(torch.uint8))
        return self._mine.handle()

    def _taken(self, handle: str, size: int) -> torch.Tensor:
        """A copy of what the other one laid."""
        if self._through is None:
            raise WorldError("what came over the stream lies in memory that is not shared; is it of another version?")
        try:
            if self._theirs is None or self._theirs[0] != handle:
                if self._theirs:
                    self._theirs[1].close()
                self._theirs = handle, self._through.open(handle)
            found = torch.empty(size, dtype=torch.uint8)
            self._theirs[1].read(0, size, found)
        except WorldError as error:
            raise ConnectionError(f"what was laid cannot be read: {error}") from error
        return found

    def _exactly(self, count: int) -> bytearray:
        found = bytearray(count)
        view, done = memoryview(found), 0
        while done < count:
            got = self._raw.recv_into(view[done:])
            if not got:
                raise ConnectionError("the stream was closed")
            done += got
        return found


def connect(place: Address, token: str, timeout_s: float, *, group: int | None = None) -> Connection:
    """A stream to a service that knows us: a group, or another service."""
    stream = Connection(socket.create_connection((place.address, place.port), timeout=timeout_s), timeout_s)
    try:
        stream.send({"token": token, "group": group, **local_capabilities()})
        answer, _ = stream.receive()
        if "error" in answer:
            raise WorldError(str(answer["error"]))
        stream.meet(answer)
    except BaseException:
        stream.close()
        raise
    return stream


@lru_cache
def _mapped_windows() -> MemfdWindows:
    """One door for all streams of this process."""
    return MemfdWindows()


@lru_cache
def _far_windows() -> NixlWindows:
    """One agent for all streams of this process."""
    return NixlWindows()


def _bytes_of(values: torch.Tensor) -> memoryview:
    flat = values.detach().contiguous().view(-1).view(torch.uint8)
    return flat.numpy().data
