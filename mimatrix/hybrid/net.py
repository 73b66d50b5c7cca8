"""Connections between groups and shard servers: frames with a small JSON header and a tensor.

Between processes of one host, and between hosts with RDMA, tensors do not travel over TCP: the sender writes them to a
window, and the receiver reads them from there. Requests and replies alternate, so a window is not overwritten before it
has been read.
"""

import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from mimatrix.comm.endpoint import own_host
from mimatrix.comm.memory.base import PeerWindow, Window, WindowKind
from mimatrix.comm.memory.memfd import MemfdWindows
from mimatrix.comm.memory.nixl import NixlWindows, nixl_available
from mimatrix.core import environment
from mimatrix.core.errors import WorldError
from mimatrix.core.framing import PREFIX_BYTES
from mimatrix.hybrid.stream import FRAMES, GREETING_S, SILENCE_S, ByteStream, make_greeting

_HEARTBEAT = FRAMES.pack({"busy": True})
_MIN_WINDOW_BYTES = 1 << 15
"""Smaller tensors are as fast over TCP."""
_RDMA_DEVICES = Path("/sys/class/infiniband")
Header = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Address:
    """Where a shard server listens."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host} port {self.port}"

    def to_json(self) -> list[str | int]:
        """Return a list for a header; `Address(*list)` restores it."""
        return [self.host, self.port]


class Connection:
    """One TCP connection between a client and a server.

    Args:
        raw: The connected socket.
        timeout_s: How long the peer may take to answer; None, at a server: it waits for requests as long as it takes.
    """

    def __init__(self, raw: socket.socket, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._silence_s = SILENCE_S if timeout_s is None else min(SILENCE_S, timeout_s)
        self._stream = ByteStream(raw, self._silence_s)
        self._is_closed, self._lock, self._send_lock = False, threading.Lock(), threading.Lock()
        self._windows: WindowKind | None = None
        self._send_window: Window | None = None
        self._peer_window: tuple[str, PeerWindow] | None = None

    def negotiate(self, peer: Header) -> None:
        """Use windows from now on if the peer's `local_capabilities` and ours allow it."""
        local = local_capabilities()
        if peer.get("host") == local["host"]:
            self._windows = _shared_memory_windows()
        elif peer.get("rdma") and local["rdma"]:
            self._windows = _rdma_windows()

    def greet(self, token: str) -> None:
        """Show the secret of the run to a server."""
        self._stream.send(make_greeting(token))

    def send(self, header: Header, values: torch.Tensor | None = None) -> None:
        """Send a header, and optionally a tensor with it."""
        payload: bytes | memoryview = b""
        if values is not None:
            header = header | {"dtype": str(values.dtype)}
            if self._windows and values.nbytes >= _MIN_WINDOW_BYTES:
                header |= {"window": [self._write_window(self._windows, values), values.nbytes]}
            else:
                payload = _as_bytes(values).numpy().data
        with self._send_lock:
            self._stream.send(FRAMES.pack(header, len(payload)))
            self._stream.send(payload)

    def send_heartbeat(self) -> None:
        """Tell a client whose request takes long that this server is alive; never blocks and never raises."""
        if self._send_lock.acquire(blocking=False):
            try:
                with suppress(OSError, ValueError):  # it is being closed
                    self._stream.send_at_once(_HEARTBEAT)
            finally:
                self._send_lock.release()

    def receive(self, timeout_s: float | None = None) -> tuple[Header, torch.Tensor | None]:
        """Return the next header and its tensor, if it has one.

        Args:
            timeout_s: How long the peer may take to begin, if not as long as usual.

        Raises:
            TimeoutError: The peer is silent, or still busy after the timeout.
            ConnectionError: The peer is gone.
            WorldError: The bytes are not a message of this protocol.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        if timeout_s is None:
            return self._receive_frame(None)
        deadline, first_s = time.monotonic() + timeout_s, min(self._silence_s, timeout_s)
        while time.monotonic() < deadline:
            header, values = self._receive_frame(first_s)
            if "busy" not in header:
                return header, values
        raise TimeoutError(f"the peer is busy, and has not answered within {timeout_s:g} s")

    def close(self) -> None:
        """Close the connection; safe to call more than once and from several threads."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        with suppress(OSError):
            self._stream.shut_down()
        self._stream.close()
        if self._send_window:
            self._send_window.close()
        if self._peer_window:
            self._peer_window[1].close()

    def _receive_frame(self, first_s: float | None) -> tuple[Header, torch.Tensor | None]:
        prefix = FRAMES.unpack_prefix(self._stream.receive(PREFIX_BYTES, first_s))
        header: Header = FRAMES.unpack_header(prefix, self._stream.receive(prefix.header_bytes, self._silence_s))
        if not prefix.payload_bytes and "window" not in header:
            return header, None
        dtype = _parse_dtype(header)
        if prefix.payload_bytes:
            return header, _as_dtype(self._stream.receive_tensor(prefix.payload_bytes), dtype)
        return header, _as_dtype(self._read_window(*_parse_window(header)), dtype)

    def _write_window(self, windows: WindowKind, values: torch.Tensor) -> str:
        """Copy a tensor to the window of this side, growing it if needed, and return its handle."""
        if self._send_window is None or len(self._send_window.bytes) < values.nbytes:
            if self._send_window:
                self._send_window.close()
            self._send_window = windows.allocate(values.nbytes)
        self._send_window.bytes[: values.nbytes].copy_(_as_bytes(values))
        return self._send_window.handle()

    def _read_window(self, handle: str, size: int) -> torch.Tensor:
        """Copy what the peer wrote to its window."""
        if self._windows is None:
            raise WorldError(
                "a peer sent a tensor through memory that is not shared; run the same version of MiMatrix on all hosts"
            )
        try:
            if self._peer_window is None or self._peer_window[0] != handle:
                if self._peer_window:
                    self._peer_window[1].close()
                self._peer_window = handle, self._windows.open(handle)
            values = torch.empty(size, dtype=torch.uint8)
            self._peer_window[1].read(0, size, values)
        except WorldError as error:
            raise ConnectionError(f"the peer's window cannot be read: {error}") from error
        return values


def connect(address: Address, token: str, timeout_s: float, *, group: int | None = None) -> Connection:
    """Connect to a shard server and authenticate.

    Args:
        address: Where the server listens.
        token: The secret of the run.
        timeout_s: For every answer. A server that is silent, even to this, is given up after a few seconds.
        group: The group that connects; None for other servers, which do not keep a server alive.
    """
    connect_s = min(GREETING_S, timeout_s)
    connection = Connection(socket.create_connection((address.host, address.port), timeout=connect_s), timeout_s)
    try:
        connection.greet(token)
        reply, _ = connection.receive(min(SILENCE_S, timeout_s))
        if "error" in reply:
            raise WorldError(str(reply["error"]))
        connection.send({"group": group, **local_capabilities()})
        connection.negotiate(reply)
    except BaseException:
        connection.close()
        raise
    return connection


def local_capabilities() -> Header:
    """Describe this end of a connection: its host, and whether it has RDMA."""
    return {"host": own_host(), "rdma": has_rdma()}


def has_rdma() -> bool:
    """Return whether other hosts can read this host's memory through its NIC; `MIMATRIX_RDMA` overrides detection."""
    override = environment.RDMA.get()
    if override in ("0", "1"):
        return override == "1" and nixl_available()
    return _RDMA_DEVICES.is_dir() and any(_RDMA_DEVICES.iterdir()) and nixl_available()


@lru_cache
def _shared_memory_windows() -> MemfdWindows:
    """Return the one server of file descriptors for all connections of this process."""
    return MemfdWindows()


@lru_cache
def _rdma_windows() -> NixlWindows:
    """Return the one NIXL agent for all connections of this process."""
    return NixlWindows()


def _as_bytes(values: torch.Tensor) -> torch.Tensor:
    return values.detach().contiguous().view(-1).view(torch.uint8)


def _parse_dtype(header: Header) -> torch.dtype:
    dtype = getattr(torch, str(header.get("dtype")).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise WorldError("a message is corrupt: its tensor has no type; run the same version of MiMatrix on all hosts")
    return dtype


def _parse_window(header: Header) -> tuple[str, int]:
    match header.pop("window"):
        case [str(handle), int(size)] if size > 0:
            return handle, size
    raise WorldError("a message is corrupt: it names no window; run the same version of MiMatrix on all hosts")


def _as_dtype(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if len(values) % dtype.itemsize:
        raise WorldError(
            f"a message is corrupt: {len(values)} bytes are not whole elements of {dtype}; run the same "
            "version of MiMatrix on all hosts"
        )
    return values.view(dtype)
