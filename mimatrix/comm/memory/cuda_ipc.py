"""CUDA IPC for GPU ranks of a host, also for ranks that share one GPU under MPS.

The memory is allocated and exported with the CUDA runtime directly: torch's own sharing keeps reference counts in
files, which a crash would leave behind. When the owner dies, the driver frees the memory.

CUDA opens handles whose memory was freed or whose owner is dead. So every window has a lifeline, a small window in
mapped memory that is opened first: it shows whether the owner is alive and still offers the window.
"""

import base64
import ctypes
from functools import lru_cache
from typing import NoReturn

import torch

from mimatrix.comm.memory.base import MappedView, check_size
from mimatrix.comm.memory.memfd import MemfdWindow, MemfdWindows
from mimatrix.core.errors import UserError, WorldError

_HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1
_BLOCK_BYTES = 2 << 20


class CudaIpcWindows:
    """Windows in the memory of one GPU. CUDA opens a handle once per process, and never an own one: both are cached."""

    def __init__(self, device: torch.device) -> None:
        if not torch.cuda.is_available():
            raise UserError("torch finds no GPU here; use windows in mapped memory")
        self.device = torch.device("cuda", device.index if device.index is not None else torch.cuda.current_device())
        self._lifelines = MemfdWindows()
        self._own: dict[str, CudaIpcWindow] = {}
        self._opened: dict[str, _Mapping] = {}

    def allocate(self, size: int) -> "CudaIpcWindow":
        """Return a new window of `size` bytes, all zero."""
        window = CudaIpcWindow(self.device, size, self._lifelines.allocate(1))
        self._own[window.handle()] = window
        return window

    def open(self, handle: str) -> MappedView:
        """Open a peer's window by its handle."""
        if handle in self._own:
            return MappedView(self._own[handle].bytes) if self._own[handle].bytes.numel() else _refuse("it is closed")
        _, lifeline = handle.split("|")
        self._lifelines.open(lifeline).close()
        if handle not in self._opened or not self._opened[handle].users:
            self._opened[handle] = _Mapping(self.device, handle)
        return CudaIpcPeer(self._opened[handle])


class CudaIpcWindow:
    """Memory of this rank on its GPU."""

    def __init__(self, device: torch.device, size: int, lifeline: MemfdWindow) -> None:
        check_size(size)
        self._device, self._size, self._lifeline = device, size, lifeline
        self._address = ctypes.c_void_p()
        # Smaller ones would share a block of the driver, which a peer can map only once.
        room = -(-size // _BLOCK_BYTES) * _BLOCK_BYTES
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()
            _check(
                cuda_runtime().cudaMalloc(ctypes.byref(self._address), ctypes.c_size_t(room)),
                f"allocating {size} bytes",
            )
        self.bytes = _as_tensor(self._address, size, device)
        self.bytes.zero_()
        torch.cuda.synchronize(device)

    def handle(self) -> str:
        """Return the size, the export handle and the lifeline."""
        exported = _IpcHandle()
        with torch.cuda.device(self._device):
            _check(cuda_runtime().cudaIpcGetMemHandle(ctypes.byref(exported), self._address), "exporting a window")
        return f"{self._size}:{base64.b64encode(bytes(exported.reserved)).decode()}|{self._lifeline.handle()}"

    def close(self) -> None:
        """Free the memory."""
        self._lifeline.close()
        if self._address:
            torch.cuda.synchronize(self._device)
            with torch.cuda.device(self._device):
                _check(cuda_runtime().cudaFree(self._address), "freeing a window")
            self._address = ctypes.c_void_p()
            self.bytes = torch.empty(0, dtype=torch.uint8, device=self._device)


class CudaIpcPeer(MappedView):
    """A peer's memory on a GPU of this host, mapped here."""

    def __init__(self, mapping: "_Mapping") -> None:
        super().__init__(mapping.bytes)
        self._mapping: _Mapping | None = mapping
        mapping.users += 1

    def close(self) -> None:
        """Close it; the last one to close unmaps the memory."""
        super().close()
        if self._mapping:
            self._mapping.users -= 1
            if not self._mapping.users:
                self._mapping.close()
            self._mapping = None


class _Mapping:
    """A peer's memory, opened once for all that use it."""

    def __init__(self, device: torch.device, handle: str) -> None:
        size, exported = handle.split("|")[0].split(":")
        self._device, self._address, self.users = device, ctypes.c_void_p(), 0
        opened = _IpcHandle.from_buffer_copy(base64.b64decode(exported))
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()
            code = cuda_runtime().cudaIpcOpenMemHandle(
                ctypes.byref(self._address), opened, ctypes.c_uint(_LAZY_PEER_ACCESS)
            )
        if code:
            cuda_runtime().cudaGetLastError()
            _refuse(cuda_error(code))
        try:
            self.bytes = _as_tensor(self._address, int(size), device)
        except WorldError:
            self.close()
            raise

    def close(self) -> None:
        """Unmap the memory."""
        torch.cuda.synchronize(self._device)
        with torch.cuda.device(self._device):
            cuda_runtime().cudaIpcCloseMemHandle(self._address)


def _refuse(reason: str) -> NoReturn:
    raise WorldError(f"the window on a GPU cannot be opened: {reason}; is its rank still there?")


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_ubyte * _HANDLE_BYTES),)


def _as_tensor(address: ctypes.c_void_p, size: int, device: torch.device) -> torch.Tensor:
    """Return a tensor over memory that this GPU reaches, without copying or owning it.

    It counts as this GPU's, also if it is a peer's: then kernels here read it over the bus. `torch.as_tensor` would see
    whose it is, and copy it.
    """
    assert address.value
    storage = torch._C._construct_storage_from_data_pointer(address.value, device, size)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (size,), (1,))


@lru_cache(maxsize=1)
def cuda_runtime() -> ctypes.CDLL:
    """Return the CUDA runtime that torch itself has loaded."""
    major = str(torch.version.cuda).split(".")[0]
    runtime = ctypes.CDLL(f"libcudart.so.{major}")
    runtime.cudaGetErrorString.restype = ctypes.c_char_p
    return runtime


def cuda_error(code: int) -> str:
    """Return CUDA's words for an error code."""
    text: bytes = cuda_runtime().cudaGetErrorString(code)
    return text.decode()


def _check(code: int, doing: str) -> None:
    if code:
        raise WorldError(f"{doing} on the GPU failed: {cuda_error(code)}; check nvidia-smi")
