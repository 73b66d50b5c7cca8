"""Mapped memory for the CPU ranks of a host: a memfd that a Unix socket hands over.

A memfd has no name: whatever crashes whenever, nothing is left behind, and the size of /dev/shm does not matter. The
socket's name is abstract, so it vanishes with its owner too. Pages exist once they are touched, so a window may be
reserved far larger than what is ever used.
"""

import array
import mmap
import os
import secrets
import socket
import struct
import threading
import time
from contextlib import suppress

import torch

from mimatrix.comm.memory.mapped_view import MappedView, check_size
from mimatrix.comm.memory.shared_storage import BEYOND, NUMBERS, SharedStorages
from mimatrix.core.errors import WorldError

_HANDOVER_S, _ASK_S = 20.0, 0.5


class MemfdWindows:
    """Windows in mapped memory. One socket per process hands out all of them."""

    def __init__(self) -> None:
        self._door = _FdServer()

    def allocate(self, size: int) -> "MemfdWindow":
        """A new window of `size` bytes, all zero."""
        return MemfdWindow(self._door, size)

    def open(self, handle: str) -> "MemfdPeer":
        """A peer's window."""
        return MemfdPeer(handle)

    def close(self) -> None:
        """Hand nothing out any more."""
        self._door.close()


class MemfdPeer(MappedView):
    """A peer's window, and what it adopted beside it: that is mapped once somebody looks there."""

    def __init__(self, handle: str) -> None:
        super().__init__(_mapped(handle))
        self._handle = handle
        self._beside: dict[int, tuple[int, MappedView]] = {}

    def view(self, start: int, stop: int) -> torch.Tensor:
        """The bytes themselves."""
        if start < BEYOND:
            return super().view(start, stop)
        name, offset = divmod(start, BEYOND)
        return self._other(name).view(offset, offset + stop - start)

    def close(self) -> None:
        """Let go of all of it."""
        self._beside.clear()
        super().close()

    def _other(self, name: int) -> MappedView:
        """What has this name now; whatever had the same number before is gone."""
        known, found = self._beside.get(name % NUMBERS, (0, None))
        if found is None or known != name:
            found = MappedView(_mapped(_beside(self._handle, name)))
            self._beside[name % NUMBERS] = name, found
        return found


class MemfdWindow:
    """Memory of this rank, backed by a memfd; `adopted` are storages beside it."""

    def __init__(self, door: "_FdServer", size: int) -> None:
        check_size(size)
        self._door, self._size = door, size
        self._fd = os.memfd_create("mimatrix", os.MFD_CLOEXEC)
        os.ftruncate(self._fd, size)
        self.bytes = torch.frombuffer(mmap.mmap(self._fd, size), dtype=torch.uint8)
        self._token = door.offer(self._fd, size)
        self.adopted = SharedStorages(self._lend, lambda name: door.withdraw(_beside(self._token, name)))

    def _lend(self, name: int, fd: int, size: int) -> None:
        self._door.offer(fd, size, _beside(self._token, name))

    @property
    def touched_bytes(self) -> int:
        """What of it exists: pages that were written to."""
        return 512 * os.fstat(self._fd).st_blocks

    def handle(self) -> str:
        """`socket:token`."""
        return f"{self._door.name}:{self._token}"

    def close(self) -> None:
        """Withdraw it. The mapping itself goes when the last tensor over it does."""
        if self._fd >= 0:
            self.adopted.close()
            self._door.withdraw(self._token)
            os.close(self._fd)
            self._fd = -1
            self.bytes = torch.empty(0, dtype=torch.uint8)


class _FdServer:
    """A Unix socket where processes of the same user collect file descriptors by token."""

    def __init__(self) -> None:
        self.name = f"mimatrix-{os.getpid()}-{secrets.token_hex(8)}"
        self._closed = False
        self._offers: dict[str, tuple[int, int]] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.bind(f"\0{self.name}")
        self._socket.listen(128)
        threading.Thread(target=self._serve, name="mimatrix-windows", daemon=True).start()

    def offer(self, fd: int, size: int, token: str = "") -> str:
        """Anyone of this user who shows the token gets the descriptor."""
        token = token or secrets.token_hex(16)
        self._offers[token] = fd, size
        return token

    def withdraw(self, token: str) -> None:
        """No longer."""
        self._offers.pop(token, None)

    def close(self) -> None:
        """Close the socket; the thread that serves it ends."""
        self._closed = True
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _serve(self) -> None:
        while not self._closed:
            try:
                visitor, _ = self._socket.accept()
            except OSError:
                time.sleep(0.01)  # too many files are open, say; or the door is being closed
                continue
            with visitor, suppress(OSError):
                # Whoever comes asks at once; one that only stands there must not keep the others out.
                visitor.settimeout(_ASK_S)
                self._answer(visitor)

    def _answer(self, visitor: socket.socket) -> None:
        credentials = visitor.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        _, uid, _ = struct.unpack("3i", credentials)
        offered = self._offers.get(visitor.recv(64).decode("ascii", "replace"))
        if uid == os.getuid() and offered:
            fd, size = offered
            socket.send_fds(visitor, [struct.pack("<Q", size)], [fd])


def _beside(token: str, name: int) -> str:
    """The token, or the handle, of what lies beside a window."""
    return f"{token}/{name}"


def _mapped(handle: str) -> torch.Tensor:
    """The memory behind a handle."""
    fd, size = _collect(handle)
    try:
        return torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)
    finally:
        os.close(fd)


def _collect(handle: str) -> tuple[int, int]:
    """The descriptor and the size behind a handle."""
    name, _, token = handle.rpartition(":")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as visitor:
        visitor.settimeout(_HANDOVER_S)
        try:
            visitor.connect(f"\0{name}")
            visitor.send(token.encode())
            message, ancillary, _, _ = visitor.recvmsg(8, socket.CMSG_SPACE(array.array("i").itemsize))
        except OSError as error:
            raise WorldError(f"the window {name} cannot be opened: {error}; is its rank still there?") from error
    descriptors = array.array("i")
    for _, _, data in ancillary:
        descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    if len(message) != 8 or not descriptors:
        raise WorldError(f"the window {name} was refused; it is closed, or belongs to another user")
    (size,) = struct.unpack("<Q", message)
    return descriptors[0], size
