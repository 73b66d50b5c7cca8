"""NIXL's agent of a process: what is registered, who is known, which reads are on their way."""

import mmap
import os
import secrets
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch

from mimatrix.core.errors import UserError, WorldError

# NIXL's thread sleeps on the network's events when its delay is not zero, and answers are no later for it; at zero it
# takes a whole core, always. NIXL's Python class gives zero, so the agent is made from the bindings.
_PROGRESS_DELAY_US = 10_000
# UCX sends 8 KiB at a time over TCP unless told otherwise; 64 KiB is what every receiver takes, and doubles the rate.
_TCP_SEGMENT = "TCP_TX_SEG_SIZE", "64k"
_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S = 20e-6, 1e-3


def nixl_available() -> bool:
    """Whether NIXL is installed here."""
    try:
        import_module("nixl")
    except ImportError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Span:
    """A range of memory; `gpu` is -1 on the host."""

    address: int
    size: int
    gpu: int

    @staticmethod
    def of(memory: torch.Tensor) -> "Span":
        """Where a contiguous tensor lies."""
        return Span(memory.data_ptr(), memory.numel() * memory.element_size(), memory.get_device())

    def holds(self, other: "Span") -> bool:
        """Whether the other lies within this one."""
        inside = self.address <= other.address and other.address + other.size <= self.address + self.size
        return inside and self.gpu == other.gpu


class PendingRead:
    """A read on its way. NIXL writes into the tensor until it is done, so the agent keeps it alive until then."""

    def __init__(self, agent: "Agent", peer: str, asked: str, request: int | None) -> None:
        self._agent, self._peer, self._asked, self._request = agent, peer, asked, request
        self._started = time.monotonic()

    def done(self) -> bool:
        """Whether the bytes are there; WorldError where the peer is lost."""
        if self._request is not None and self._agent.arrived(self._request, self._peer, self._asked):
            self._request = None
        return self._request is None

    def wait(self, deadline: float | None = None) -> None:
        """Back when the bytes are there. WorldError where the peer is lost, or at `deadline` (of `time.monotonic`).

        After the deadline the bytes may still come: wait again, or leave the tensor alone.
        """
        until = self._started + self._agent.patience_s if deadline is None else deadline
        while not self.done():
            waited = (now := time.monotonic()) - self._started
            if now > until:
                raise WorldError(f"{self._peer} did not give {self._asked} in {waited:.1f} s; is its host reachable?")
            # A tenth of what it took so far: short reads are seen soon, and long ones leave the core to NIXL's thread.
            time.sleep(min(max(waited / 10, _SHORTEST_SLEEP_S), _LONGEST_SLEEP_S))


class Agent:
    """One per process, for all its threads. `name` is host, process and a number of its own."""

    def __init__(self, patience_s: float) -> None:
        self.patience_s = patience_s
        self.name = f"{socket.gethostname()}/{os.getpid()}/{secrets.token_hex(4)}"
        self._nixl, self._errors = _bindings()
        self._agent = self._started()
        self._registered: dict[Span, object] = {}
        self._guests: dict[Span, int] = {}
        self._flying: dict[int, tuple[torch.Tensor, Span | None]] = {}
        self._closed_pages: list[mmap.mmap] = []
        self._known: set[str] = {self.name}
        self._lock = threading.RLock()

    def register(self, span: Span, memory: object) -> None:
        """Let peers read it, and read into it; `memory`, which owns it, is kept alive."""
        if span in self._registered:
            raise UserError("this memory is a window already; use that one")
        self._pin(span)
        self._registered[span] = memory

    def forget(self, span: Span, pages: mmap.mmap | None) -> None:
        """No longer. `pages`, if they are its own, become empty but keep their addresses."""
        if self._agent is None:
            return
        self._registered.pop(span)
        self._agent.deregisterMem(self._listed(span))
        if pages:
            pages.madvise(mmap.MADV_DONTNEED)
            self._closed_pages.append(pages)

    def metadata(self, span: Span) -> bytes:
        """What a peer's agent needs to reach this one and to read the span."""
        return bytes(self._live().getLocalPartialMD(self._listed(span), True))

    def meet(self, peer: str, first: bytes, then: bytes) -> None:
        """Know an agent, by the metadata `first`, and one more window of it, by `then`."""
        if peer == self.name:
            return
        with self._lock:
            try:
                for metadata in (then,) if peer in self._known else (first, then):
                    self._live().loadRemoteMD(metadata)
            except self._errors as error:
                self._lose(peer)
                raise WorldError(f"{peer} cannot be reached: {error}; is its process alive?") from error
            self._known.add(peer)

    def start_read(self, peer: str, asked: str, source: Span, into: torch.Tensor) -> PendingRead:
        """Post a read of a peer's memory."""
        if not source.size:
            return PendingRead(self, peer, asked, None)
        target = Span.of(into)
        guest = None if any(span.holds(target) for span in tuple(self._registered)) else target
        self._welcome(guest)
        try:
            return PendingRead(self, peer, asked, self._post(peer, source, into, guest))
        except self._errors as error:
            self._dismiss(guest)
            self._lose(peer)
            raise WorldError(f"{peer} cannot give {asked}: {error}; is its process alive?") from error

    def arrived(self, request: int, peer: str, asked: str) -> bool:
        """Whether a read is complete. WorldError where it never will be."""
        try:
            if self._live().getXferStatus(request) == self._nixl.NIXL_IN_PROG:
                return False
        except self._errors as error:
            self._land(request)
            self._lose(peer)
            raise WorldError(f"{peer} was lost while it gave {asked}: {error}; is its process alive?") from error
        self._land(request)
        return True

    def close(self) -> None:
        """End everything; nobody answers peers any more."""
        if self._agent is None:
            return
        unfinished = list(self._flying.values())
        for request in tuple(self._flying):
            self._land(request)
        for peer in self._known - {self.name}:
            self._lose(peer)
        # With its last reference NIXL ends its thread; only then nothing writes into unfinished tensors any more.
        self._agent = None
        unfinished.clear()
        self._closed_pages.clear()

    def _post(self, peer: str, source: Span, into: torch.Tensor, guest: Span | None) -> int:
        agent, nixl = self._live(), self._nixl
        request: int = agent.createXferReq(nixl.NIXL_READ, self._transfer(Span.of(into)), self._transfer(source), peer)
        try:
            agent.postXferReq(request)
        except self._errors:
            agent.releaseXferReq(request)
            raise
        self._flying[request] = into, guest
        return request

    def _land(self, request: int) -> None:
        _, guest = self._flying.pop(request)
        with suppress(*self._errors):
            self._live().releaseXferReq(request)
        self._dismiss(guest)

    def _welcome(self, guest: Span | None) -> None:
        """Register memory for a read, if no other read into it has done so."""
        with self._lock:
            if guest:
                if guest not in self._guests:
                    self._pin(guest)
                self._guests[guest] = self._guests.get(guest, 0) + 1

    def _dismiss(self, guest: Span | None) -> None:
        with self._lock:
            if guest:
                self._guests[guest] -= 1
                if not self._guests[guest]:
                    self._guests.pop(guest)
                    self._live().deregisterMem(self._listed(guest))

    def _lose(self, peer: str) -> None:
        """Forget an agent that is gone, so that it is met anew if a window of it is opened again."""
        with self._lock, suppress(*self._errors):
            self._known.discard(peer)
            self._live().invalidateRemoteMD(peer)

    def _pin(self, span: Span) -> None:
        try:
            self._live().registerMem(self._listed(span))
        except self._errors as error:
            raise WorldError(
                f"NIXL cannot register {span.size} bytes: {error}; is the limit of locked memory (ulimit -l) too low?"
            ) from error

    def _live(self) -> Any:
        if self._agent is None:
            raise UserError("the NIXL windows of this process are closed; make new ones with NixlWindows()")
        return self._agent

    def _started(self) -> Any:
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = _PROGRESS_DELAY_US
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_STRICT
        try:
            agent = self._nixl.nixlAgent(self.name, config)
            agent.createBackend("UCX", _preferences())
        except self._errors as error:
            raise WorldError(f"NIXL cannot start UCX: {error}; does UCX_TLS name transports of this host?") from error
        return agent

    def _listed(self, span: Span) -> Any:
        return self._nixl.nixlRegDList(self._memory(span), [(span.address, span.size, max(span.gpu, 0), "")])

    def _transfer(self, span: Span) -> Any:
        return self._nixl.nixlXferDList(self._memory(span), [(span.address, span.size, max(span.gpu, 0))])

    def _memory(self, span: Span) -> Any:
        return self._nixl.DRAM_SEG if span.gpu < 0 else self._nixl.VRAM_SEG


def _preferences() -> dict[str, str]:
    """What UCX should do otherwise than by itself, where the user has not said."""
    key, value = _TCP_SEGMENT
    return {} if f"UCX_{key}" in os.environ else {"engine_config": f"{key}={value}"}


def _bindings() -> tuple[Any, tuple[type[Exception], ...]]:
    """NIXL's bindings and all that they raise."""
    try:
        import_module("nixl")
    except ImportError as error:
        raise UserError(f"NIXL is not installed ({error}); run pip install 'mimatrix[nixl]'") from error
    bindings = import_module("nixl._bindings")
    errors = [found for found in vars(bindings).values() if isinstance(found, type) and issubclass(found, Exception)]
    return bindings, tuple(errors)
