"""Mapped memory for the CPU ranks of a host: a memfd whose descriptor is sent over a Unix socket.

A memfd has no name, so a crash leaves nothing behind and the size of /dev/shm does not matter. The socket's name is
abstract, so it vanishes with its owner too. Pages exist once they are touched, so a window may be far larger than what
is ever used.
"""

import array
import fcntl
import mmap
import os
import secrets
import socket
import struct
import threading
import time
from contextlib import suppress

import torch

from mimatrix.comm.memory.base import MappedView, check_size
from mimatrix.comm.memory.shared_storage import MAX_STORAGES, STORAGE_SPACE, SharedStorages
from mimatrix.core.errors import WorldError

_OPEN_S, _REQUEST_S = 20.0, 5.0
_ACCEPT_PAUSE_S = 0.01
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""A window keeps its size: a peer that touches mapped pages beyond the end of a file is killed by SIGBUS."""


class MemfdWindows:
    """Windows in mapped memory. One socket per process serves all of them."""

    def __init__(self) -> None:
        self._server = _FdServer()

    def allocate(self, size: int) -> "MemfdWindow":
        """Return a new window of `size` bytes, all zero."""
        return MemfdWindow(self._server, size)

    def open(self, handle: str) -> "MemfdPeer":
        """Open a peer's window by its handle."""
        return MemfdPeer(handle)

    def close(self) -> None:
        """Stop serving windows."""
        self._server.close()


class MemfdPeer(MappedView):
    """A peer's window, and its shared storages, which are mapped at the first read."""

    def __init__(self, handle: str) -> None:
        super().__init__(_map(handle, is_sealed=True))
        self._handle = handle
        self._storages: dict[int, tuple[int, MappedView]] = {}

    def view(self, start: int, stop: int) -> torch.Tensor:
        """Return bytes [start, stop) in place; offsets from `STORAGE_SPACE` on are in shared storages."""
        if start < STORAGE_SPACE:
            return super().view(start, stop)
        number, offset = divmod(start, STORAGE_SPACE)
        return self._storage(number).view(offset, offset + stop - start)

    def close(self) -> None:
        """Close the window and its shared storages."""
        self._storages.clear()
        super().close()

    def _storage(self, number: int) -> MappedView:
        """Return a shared storage; an older one with the same slot does not exist any more."""
        slot = number % MAX_STORAGES
        mapped, storage = self._storages.get(slot, (0, None))
        if storage is None or mapped != number:
            storage = MappedView(_map(_storage_name(self._handle, number)))
            self._storages[slot] = number, storage
        return storage


class MemfdWindow:
    """Memory of this rank, backed by a memfd, and `storages` that are shared next to it."""

    def __init__(self, server: "_FdServer", size: int) -> None:
        check_size(size)
        self._server, self._size = server, size
        self._fd = os.memfd_create("mimatrix", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, size)
        fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, _SEALS)
        self.bytes = torch.frombuffer(mmap.mmap(self._fd, size), dtype=torch.uint8)
        token = self._token = server.offer(self._fd, size)
        self.storages = SharedStorages(
            lambda number, fd, size: server.offer(fd, size, _storage_name(token, number)),
            lambda number: server.withdraw(_storage_name(token, number)),
        )

    @property
    def touched_bytes(self) -> int:
        """Bytes of the pages that exist because they were written to."""
        return 512 * os.fstat(self._fd).st_blocks

    def handle(self) -> str:
        """Return `socket:token`."""
        return f"{self._server.name}:{self._token}"

    def close(self) -> None:
        """Withdraw the window. The mapping ends with the last tensor over it."""
        if self._fd >= 0:
            self.storages.close()
            self._server.withdraw(self._token)
            os.close(self._fd)
            self._fd = -1
            self.bytes = torch.empty(0, dtype=torch.uint8)


class _FdServer:
    """A Unix socket that sends file descriptors to processes of the same user, by token.

    Nothing is read from processes of other users, and clients are served side by side: none delays another.
    """

    def __init__(self) -> None:
        self.name = f"mimatrix-{os.getpid()}-{secrets.token_hex(8)}"
        self._closed = False
        self._offers: dict[str, tuple[int, int]] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(f"\0{self.name}")
        self._socket.listen(128)
        threading.Thread(target=self._serve, name="mimatrix-windows", daemon=True).start()

    def offer(self, fd: int, size: int, token: str = "") -> str:
        """Send the descriptor to every process of this user that shows the token, and return the token."""
        token = token or secrets.token_hex(16)
        self._offers[token] = fd, size
        return token

    def withdraw(self, token: str) -> None:
        """Stop offering the descriptor of a token."""
        self._offers.pop(token, None)

    def close(self) -> None:
        """Close the socket and end the thread that serves it."""
        self._closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _serve(self) -> None:
        while not self._closed:
            try:
                client, _ = self._socket.accept()
            except OSError:
                time.sleep(_ACCEPT_PAUSE_S)  # too many files are open, or the socket is being closed
                continue
            try:
                self._admit(client)
            except (OSError, RuntimeError):  # it has gone, or there is no room for a thread
                client.close()

    def _admit(self, client: socket.socket) -> None:
        """Answer a client of this user on a thread of its own, and close the connection of any other."""
        if _peer_uid(client) != os.getuid():
            client.close()
            return
        threading.Thread(target=self._answer, args=(client,), name="mimatrix-window", daemon=True).start()

    def _answer(self, client: socket.socket) -> None:
        with client, suppress(OSError):
            client.settimeout(_REQUEST_S)
            offered = self._offers.get(client.recv(64).decode("ascii", "replace"))
            if offered:
                fd, size = offered
                socket.send_fds(client, [struct.pack("<Q", size)], [fd])


def _peer_uid(client: socket.socket) -> int:
    """Return the user of the process that has connected, which the kernel knows."""
    credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", credentials)
    return int(uid)


def _storage_name(window: str, number: int) -> str:
    """Return the token, or the handle, of a shared storage next to a window."""
    return f"{window}/{number}"


def _map(handle: str, *, is_sealed: bool = False) -> torch.Tensor:
    """Map the memory of a handle; with `is_sealed` only if it cannot be shrunk; torch cannot seal storages."""
    fd, size = _receive_fd(handle)
    try:
        if os.fstat(fd).st_size < size or (is_sealed and not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK):
            raise WorldError(f"the window {handle.partition(':')[0]} is smaller than announced, or may become so")
        return torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)
    finally:
        os.close(fd)


def _receive_fd(handle: str) -> tuple[int, int]:
    """Return the descriptor and the size of a handle's window."""
    name, _, token = handle.rpartition(":")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as client:
        client.settimeout(_OPEN_S)
        try:
            client.connect(f"\0{name}")
            client.send(token.encode())
            message, ancillary, _, _ = client.recvmsg(8, socket.CMSG_SPACE(array.array("i").itemsize))
        except OSError as error:
            raise WorldError(f"the window {name} cannot be opened: {error}; is its rank still there?") from error
    descriptors = array.array("i")
    for _, _, data in ancillary:
        descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    if len(message) != 8 or not descriptors:
        raise WorldError(
            f"the window {name} was refused: it is closed, or belongs to another user; is its rank still there?"
        )
    (size,) = struct.unpack("<Q", message)
    return descriptors[0], size
