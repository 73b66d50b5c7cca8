"""Connections between groups and shard servers: frames with a small JSON header and a tensor.

Between processes of one host, and between hosts with RDMA, tensors do not travel over TCP: the sender writes them to a
window, and the receiver reads them from there. Requests and replies alternate, so a window is not overwritten before it
has been read.
"""

import socket
import threading
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
from mimatrix.core.framing import PREFIX_BYTES, FrameFormat

FRAMES = FrameFormat(b"MMH2", max_payload_bytes=1 << 40)
"""The magic ends with the version of the protocol."""
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
    """One TCP connection between a client and a server. A client has a timeout; a server waits for requests."""

    def __init__(self, raw: socket.socket, timeout_s: float) -> None:
        self._raw = raw
        raw.settimeout(timeout_s)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3)):
            raw.setsockopt(socket.IPPROTO_TCP, option, value)
        self._is_closed, self._lock = False, threading.Lock()
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

    def disable_timeout(self) -> None:
        """Wait for the peer as long as it computes; TCP keep-alive still detects a host that is gone."""
        self._raw.settimeout(None)

    def send(self, header: Header, values: torch.Tensor | None = None) -> None:
        """Send a header, and optionally a tensor with it."""
        payload: bytes | memoryview = b""
        if values is not None:
            header = header | {"dtype": str(values.dtype)}
            if self._windows and values.nbytes >= _MIN_WINDOW_BYTES:
                header |= {"window": [self._write_window(self._windows, values), values.nbytes]}
            else:
                payload = _as_bytes(values).numpy().data
        self._raw.sendall(FRAMES.pack(header, len(payload)))
        if payload:
            self._raw.sendall(payload)

    def receive(self) -> tuple[Header, torch.Tensor | None]:
        """Return the next header and its tensor, if it has one.

        Raises:
            ConnectionError: The peer is gone.
            WorldError: The bytes are not a message of this protocol.
        """
        prefix = FRAMES.unpack_prefix(self._receive_exactly(PREFIX_BYTES))
        header: Header = FRAMES.unpack_header(prefix, self._receive_exactly(prefix.header_bytes))
        if not prefix.payload_bytes and "window" not in header:
            return header, None
        dtype = getattr(torch, header["dtype"].removeprefix("torch."))
        if prefix.payload_bytes:
            return header, torch.frombuffer(self._receive_exactly(prefix.payload_bytes), dtype=dtype)
        return header, self._read_window(*header.pop("window")).view(dtype)

    def close(self) -> None:
        """Close the connection; safe to call more than once and from several threads."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        with suppress(OSError):
            self._raw.shutdown(socket.SHUT_RDWR)
        self._raw.close()
        if self._send_window:
            self._send_window.close()
        if self._peer_window:
            self._peer_window[1].close()

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

    def _receive_exactly(self, count: int) -> bytearray:
        buffer = bytearray(count)
        view, done = memoryview(buffer), 0
        while done < count:
            received = self._raw.recv_into(view[done:])
            if not received:
                raise ConnectionError("the peer closed the connection")
            done += received
        return buffer


def connect(address: Address, token: str, timeout_s: float, *, group: int | None = None) -> Connection:
    """Connect to a shard server and authenticate.

    Args:
        address: Where the server listens.
        token: The secret of the run.
        timeout_s: For connecting, and for every later send and receive.
        group: The group that connects; None for other servers, which do not keep a server alive.
    """
    connection = Connection(socket.create_connection((address.host, address.port), timeout=timeout_s), timeout_s)
    try:
        connection.send({"token": token, "group": group, **local_capabilities()})
        reply, _ = connection.receive()
        if "error" in reply:
            raise WorldError(str(reply["error"]))
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
