"""Windows that other hosts read one-sidedly, over NIXL and UCX: RDMA if the NICs support it, otherwise TCP.

NIXL is optional, and imported only when windows are created. UCX chooses its transports itself (`UCX_TLS`). Two
containers or network namespaces of one kernel look like one host to it: there, set `UCX_TLS=tcp`.

If the NIC cannot read by itself (TCP), a thread of NIXL in the owner's process answers with the bytes at the requested
address, without checking whether they still belong to a window. Hence:
- A closed window keeps its addresses, though not its pages: a peer that reads too late gets zeros instead of crashing
  the owner. Nor does an address ever belong to two windows, whose keys peers would confuse.
- Every agent has a small table of the tokens of its open windows. `open` reads the token one-sidedly, so neither a
  closed window nor one of a dead owner opens.
One problem of UCX remains: over TCP it aborts (SIGABRT) an owner that was stopped while a reader went away, when the
owner resumes and answers that reader's request. By then its group has reported it as lost.
"""

import base64
import binascii
import json
import mmap
import secrets
import threading
from dataclasses import asdict, dataclass

import torch

from mimatrix.comm.memory.base import check_size
from mimatrix.comm.memory.nixl_agent import Agent, PendingRead, Span, nixl_available
from mimatrix.core.errors import UserError, WorldError

__all__ = ["NixlPeer", "NixlWindow", "NixlWindows", "PendingRead", "nixl_available"]

_TOKEN_BYTES = 16
_MAX_WINDOWS = 4096
_HEX_FIELDS = ("table_metadata", "token", "metadata")
# Linux has it, Python's mmap names it from 3.13 on.
_MAP_NORESERVE = 0x4000


class NixlWindows:
    """Windows over the one NIXL agent of this process. `timeout_s` bounds reads that have no deadline of their own."""

    def __init__(self, timeout_s: float = 30.0) -> None:
        self._agent = Agent(timeout_s)
        self._table = _LivenessTable(self._agent)

    def allocate(self, size: int, device: str | torch.device = "cpu") -> "NixlWindow":
        """Return a new window of `size` bytes, all zero. Host pages exist once touched, unless a NIC pins them."""
        check_size(size)
        if torch.device(device).type != "cpu":
            return self.publish(torch.zeros(size, dtype=torch.uint8, device=device))
        pages = _reserve(size)
        return NixlWindow(self._agent, self._table, torch.frombuffer(pages, dtype=torch.uint8), pages)

    def publish(self, memory: torch.Tensor) -> "NixlWindow":
        """Return a window over an existing tensor; its memory must stay valid until no peer reads it any more."""
        if not memory.is_contiguous() or not memory.numel():
            raise UserError("a window needs a contiguous tensor that is not empty; pass tensor.contiguous()")
        return NixlWindow(self._agent, self._table, memory.detach().reshape(-1).view(torch.uint8), None)

    def open(self, handle: str) -> "NixlPeer":
        """Open a peer's window by its handle, and check that its owner still offers it."""
        published = _Published.from_text(handle)
        self._agent.add_peer(published.agent, published.table_metadata, published.metadata)
        self._table.check(published)
        return NixlPeer(self._agent, published)

    def close(self) -> None:
        """Disconnect from all peers and end NIXL; open windows of this process cannot be read any more."""
        self._agent.close()


class NixlWindow:
    """Memory of this rank that peers on other hosts read."""

    def __init__(self, agent: Agent, table: "_LivenessTable", memory: torch.Tensor, pages: mmap.mmap | None) -> None:
        self.bytes = memory
        self._agent, self._table, self._pages = agent, table, pages
        self._span = Span.of(memory)
        agent.register(self._span, memory)
        self._slot, self._token = table.add()
        self._open = True

    def handle(self) -> str:
        """Return how to reach the agent, where the bytes are, and the token that shows that they still are there."""
        return _Published(
            agent=self._agent.name,
            table_metadata=self._table.metadata,
            table_address=self._table.address,
            slot=self._slot,
            token=self._token,
            metadata=self._agent.metadata(self._span),
            **asdict(self._span),
        ).to_text()

    def close(self) -> None:
        """Withdraw the window and free its pages; late readers get zeros."""
        if self._open:
            self._open = False
            self._table.remove(self._slot)
            self._agent.deregister(self._span, self._pages)
            self.bytes = torch.empty(0, dtype=torch.uint8)


class NixlPeer:
    """A window of another process, on any host."""

    def __init__(self, agent: Agent, published: "_Published") -> None:
        self._agent, self._published = agent, published
        self._open = True

    def view(self, start: int, stop: int) -> None:
        """Return None: the bytes are not mapped here."""
        self._check(start, stop)

    def read(self, start: int, stop: int, into: torch.Tensor) -> None:
        """Copy bytes [start, stop); raise WorldError if the peer is lost or late."""
        self.start_read(start, stop, into).wait()

    def start_read(self, start: int, stop: int, into: torch.Tensor) -> PendingRead:
        """Start to copy bytes [start, stop): fastest into a window of this process, also possible into other memory.

        Other memory is registered for this one read. A cached registration would outlive the tensor and pin pages that
        are not at its address any more; reading into scratch memory would cost a copy, and limit the size. Kernels that
        use `into` must have ended before.
        """
        self._check(start, stop)
        if into.dtype != torch.uint8 or into.numel() != stop - start or not into.is_contiguous():
            raise UserError(f"{stop - start} bytes need a contiguous tensor of uint8 of that length; pass one")
        description = f"bytes {start} to {stop} of its window of {self._published.size}"
        return self._agent.start_read(self._published.agent, description, self._published.span(start, stop), into)

    def close(self) -> None:
        """Close it; the connection stays open for the other windows of its process."""
        self._open = False

    def _check(self, start: int, stop: int) -> None:
        if not self._open:
            raise UserError("this window was closed here; open it again by its handle")
        if not 0 <= start <= stop <= self._published.size:
            raise UserError(f"bytes {start} to {stop} are outside the window; use 0 to {self._published.size}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Published:
    """The content of a handle: the agent and how to reach it, its table, the window's place there and in memory."""

    agent: str
    table_metadata: bytes
    table_address: int
    slot: int
    token: bytes
    metadata: bytes
    address: int
    size: int
    gpu: int

    def span(self, start: int, stop: int) -> Span:
        return Span(self.address + start, stop - start, self.gpu)

    def to_text(self) -> str:
        plain = {key: value.hex() if isinstance(value, bytes) else value for key, value in asdict(self).items()}
        return base64.b64encode(json.dumps(plain).encode()).decode()

    @staticmethod
    def from_text(text: str) -> "_Published":
        try:
            plain = json.loads(base64.b64decode(text, validate=True))
            return _Published(**{**plain, **{key: bytes.fromhex(plain[key]) for key in _HEX_FIELDS}})
        except (ValueError, KeyError, TypeError, binascii.Error) as error:
            raise UserError(
                f"{text[:40]!r} is not the handle of a NIXL window; pass what its handle() returned"
            ) from error


class _LivenessTable:
    """The tokens of this process's open windows, where peers read them; zeros mean no window."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._pages = _reserve(_MAX_WINDOWS * _TOKEN_BYTES)
        span = Span.of(torch.frombuffer(self._pages, dtype=torch.uint8))
        agent.register(span, self._pages)
        self.address, self.metadata = span.address, agent.metadata(span)
        self._free = list(reversed(range(_MAX_WINDOWS)))
        self._lock = threading.Lock()

    def add(self) -> tuple[int, bytes]:
        """Add a window and return its slot and token."""
        with self._lock:
            if not self._free:
                raise UserError(f"{_MAX_WINDOWS} windows are open; close some, or use slots of one arena")
            slot, token = self._free.pop(), secrets.token_bytes(_TOKEN_BYTES)
            self._pages[slot * _TOKEN_BYTES : (slot + 1) * _TOKEN_BYTES] = token
            return slot, token

    def remove(self, slot: int) -> None:
        """Remove the window of a slot."""
        with self._lock:
            self._pages[slot * _TOKEN_BYTES : (slot + 1) * _TOKEN_BYTES] = bytes(_TOKEN_BYTES)
            self._free.append(slot)

    def check(self, published: _Published) -> None:
        """Raise WorldError unless the window is in its owner's table."""
        token = torch.empty(_TOKEN_BYTES, dtype=torch.uint8)
        source = Span(published.table_address + published.slot * _TOKEN_BYTES, _TOKEN_BYTES, -1)
        self._agent.start_read(published.agent, "its table of windows", source, token).wait()
        if bytes(token.tolist()) != published.token:
            raise WorldError(f"the window of {published.agent} is closed; is its rank still in the group?")


def _reserve(size: int) -> mmap.mmap:
    """Return zeros that take memory page by page as they are touched."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
