"""Windows that other hosts read one-sidedly, over NIXL and the UCX inside it: RDMA where the NICs can, otherwise TCP.

NIXL is optional, and imported only when windows are made. Which transports serve is UCX's own choice (`UCX_TLS`). Two
containers or network namespaces of one kernel look like one host to it: there, set `UCX_TLS=tcp`.

Where the NIC cannot read by itself (TCP), a thread of NIXL in the owner's process answers with whatever lies at the
address it is asked for, without looking whether it still belongs to a window. Hence two habits here:
- A closed window keeps its addresses, though not its pages: a peer that reads too late gets zeros, instead of killing
  the owner. It also means that an address never stands for two windows, of which peers would confuse the keys.
- Every agent keeps a small roll of the tokens of its living windows. `open` reads the token one-sidedly, so that
  neither a closed window nor a dead owner opens.
What remains is UCX's own: over TCP it ends (SIGABRT) an owner that was stopped while a reader went away, when the owner
wakes and answers that reader's request. By then its group has given it up as lost.
"""

import base64
import binascii
import json
import mmap
import secrets
import threading
from dataclasses import asdict, dataclass

import torch

from mimatrix.comm.memory.mapped_view import check_size
from mimatrix.comm.memory.nixl_agent import Agent, PendingRead, Span, nixl_available
from mimatrix.core.errors import UserError, WorldError

__all__ = ["NixlPeer", "NixlWindow", "NixlWindows", "PendingRead", "nixl_available"]

_TOKEN_BYTES = 16
_MOST_WINDOWS = 4096
_IN_HEX = ("roll_metadata", "token", "metadata")
# Linux has it, Python's mmap names it from 3.13 on.
_MAP_NORESERVE = 0x4000


class NixlWindows:
    """Windows over the one NIXL agent of this process. `patience_s` bounds reads that have no deadline of their own."""

    def __init__(self, patience_s: float = 30.0) -> None:
        self._agent = Agent(patience_s)
        self._roll = _LivenessTable(self._agent)

    def allocate(self, size: int, device: str | torch.device = "cpu") -> "NixlWindow":
        """A new window of `size` bytes, all zero. On the host pages exist once touched, unless a NIC pins them."""
        check_size(size)
        if torch.device(device).type != "cpu":
            return self.publish(torch.zeros(size, dtype=torch.uint8, device=device))
        pages = _reserve(size)
        return NixlWindow(self._agent, self._roll, torch.frombuffer(pages, dtype=torch.uint8), pages)

    def publish(self, memory: torch.Tensor) -> "NixlWindow":
        """A window over a tensor that is there already; its addresses must stay valid until no peer reads any more."""
        if not memory.is_contiguous() or not memory.numel():
            raise UserError("a window needs a contiguous tensor that is not empty; pass tensor.contiguous()")
        return NixlWindow(self._agent, self._roll, memory.detach().reshape(-1).view(torch.uint8), None)

    def open(self, handle: str) -> "NixlPeer":
        """A peer's window; its owner is asked whether it is still there."""
        published = _Published.from_text(handle)
        self._agent.meet(published.agent, published.roll_metadata, published.metadata)
        self._roll.check(published)
        return NixlPeer(self._agent, published)

    def close(self) -> None:
        """Let go of all peers and of NIXL; windows of this process that are still open cannot be read any more."""
        self._agent.close()


class NixlWindow:
    """Memory of this rank that peers on other hosts read."""

    def __init__(self, agent: Agent, roll: "_LivenessTable", memory: torch.Tensor, pages: mmap.mmap | None) -> None:
        self.bytes = memory
        self._agent, self._roll, self._pages = agent, roll, pages
        self._span = Span.of(memory)
        agent.register(self._span, memory)
        self._slot, self._token = roll.enter()
        self._open = True

    def handle(self) -> str:
        """How to reach the agent, where the bytes lie, and the token that shows that they still do."""
        metadata = self._agent.metadata(self._span)
        roll, agent = self._roll, self._agent.name
        place = asdict(self._span)
        return _Published(agent, roll.metadata, roll.address, self._slot, self._token, metadata, **place).to_text()

    def close(self) -> None:
        """Withdraw it and give the pages back; late readers get zeros."""
        if self._open:
            self._open = False
            self._roll.strike(self._slot)
            self._agent.forget(self._span, self._pages)
            self.bytes = torch.empty(0, dtype=torch.uint8)


class NixlPeer:
    """A window of another process, wherever that runs."""

    def __init__(self, agent: Agent, published: "_Published") -> None:
        self._agent, self._published = agent, published
        self._open = True

    def view(self, start: int, stop: int) -> None:
        """Nothing: the bytes are not mapped here."""
        self._check(start, stop)

    def read(self, start: int, stop: int, into: torch.Tensor) -> None:
        """Fetch them; WorldError where the peer is lost, or late."""
        self.start_read(start, stop, into).wait()

    def start_read(self, start: int, stop: int, into: torch.Tensor) -> PendingRead:
        """Begin to fetch them: quickest into a window of this process, and into other memory possible.

        Other memory is registered for this one read. A registration that were kept would outlive the tensor and pin
        pages that no longer stand behind its address; a scratch to read into would cost a copy, and have a size.
        What a GPU still does with `into` must be done before.
        """
        self._check(start, stop)
        if into.dtype != torch.uint8 or into.numel() != stop - start or not into.is_contiguous():
            raise UserError(f"{stop - start} bytes need a contiguous tensor of uint8 of that length to be read into")
        asked = f"bytes {start} to {stop} of its window of {self._published.size}"
        return self._agent.start_read(self._published.agent, asked, self._published.span(start, stop), into)

    def close(self) -> None:
        """Let go of it; the connection stays, for its process's other windows."""
        self._open = False

    def _check(self, start: int, stop: int) -> None:
        if not self._open:
            raise UserError("this window was closed here; open it again by its handle")
        if not 0 <= start <= stop <= self._published.size:
            raise UserError(f"bytes {start} to {stop} are not within the window of {self._published.size} bytes")


@dataclass(frozen=True, slots=True)
class _Published:
    """What a handle says: the agent and how to reach it, its roll, the window's place there and in memory."""

    agent: str
    roll_metadata: bytes
    roll: int
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
            return _Published(**{**plain, **{key: bytes.fromhex(plain[key]) for key in _IN_HEX}})
        except (ValueError, KeyError, TypeError, binascii.Error) as error:
            raise UserError(f"{text[:40]!r} is no handle of a NIXL window; pass what its handle() gave") from error


class _LivenessTable:
    """The tokens of this process's living windows, where peers read them; zeros stand for no window."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._pages = _reserve(_MOST_WINDOWS * _TOKEN_BYTES)
        span = Span.of(torch.frombuffer(self._pages, dtype=torch.uint8))
        agent.register(span, self._pages)
        self.address, self.metadata = span.address, agent.metadata(span)
        self._free = list(reversed(range(_MOST_WINDOWS)))
        self._lock = threading.Lock()

    def enter(self) -> tuple[int, bytes]:
        """The slot and the token of a new window."""
        with self._lock:
            if not self._free:
                raise UserError(f"{_MOST_WINDOWS} windows are open; close some, or use slots of one arena")
            slot, token = self._free.pop(), secrets.token_bytes(_TOKEN_BYTES)
            self._pages[slot * _TOKEN_BYTES : (slot + 1) * _TOKEN_BYTES] = token
            return slot, token

    def strike(self, slot: int) -> None:
        """Its window is no more."""
        with self._lock:
            self._pages[slot * _TOKEN_BYTES : (slot + 1) * _TOKEN_BYTES] = bytes(_TOKEN_BYTES)
            self._free.append(slot)

    def check(self, published: _Published) -> None:
        """WorldError unless the window stands in its owner's roll."""
        token = torch.empty(_TOKEN_BYTES, dtype=torch.uint8)
        place = Span(published.roll + published.slot * _TOKEN_BYTES, _TOKEN_BYTES, -1)
        self._agent.start_read(published.agent, "its roll of windows", place, token).wait()
        if bytes(token.tolist()) != published.token:
            raise WorldError(f"the window of {published.agent} is closed; is its rank still in the group?")


def _reserve(size: int) -> mmap.mmap:
    """Zeros that take memory page by page, as they are touched."""
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE)
