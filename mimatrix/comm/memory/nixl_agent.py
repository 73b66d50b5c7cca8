"""The NIXL agent of a process: its registered memory, its peers, and its reads in flight."""

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

# NIXL's thread sleeps on network events if its delay is not zero, and answers no later for it; at zero it takes a whole
# core all the time. NIXL's Python class sets zero, so the agent is created from the bindings.
_PROGRESS_DELAY_US = 10_000
# By default UCX sends 8 KiB at a time over TCP; every receiver accepts 64 KiB, which doubles the rate.
_TCP_SEGMENT = "TCP_TX_SEG_SIZE", "64k"
_SHORTEST_SLEEP_S, _LONGEST_SLEEP_S = 20e-6, 1e-3


def nixl_available() -> bool:
    """Return whether NIXL is installed."""
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
        """Return the memory of a contiguous tensor."""
        return Span(memory.data_ptr(), memory.nbytes, memory.get_device())

    def holds(self, other: "Span") -> bool:
        """Return whether the other is within this one."""
        is_inside = self.address <= other.address and other.address + other.size <= self.address + self.size
        return is_inside and self.gpu == other.gpu


class PendingRead:
    """A read in flight. NIXL writes into the tensor until it is complete, so the agent keeps it alive until then."""

    def __init__(self, agent: "Agent", peer: str, description: str, request: int | None) -> None:
        self._agent, self._peer, self._description, self._request = agent, peer, description, request
        self._started = time.monotonic()

    def done(self) -> bool:
        """Return whether the bytes are there; raise WorldError if the peer is lost."""
        if self._request is not None and self._agent.is_complete(self._request, self._peer, self._description):
            self._request = None
        return self._request is None

    def wait(self, deadline: float | None = None) -> None:
        """Wait until the bytes are there; raise WorldError if the peer is lost, or at `deadline` (`time.monotonic`).

        After the deadline the bytes may still arrive: wait again, or do not use the tensor.
        """
        until = self._started + self._agent.timeout_s if deadline is None else deadline
        while not self.done():
            waited_s = (now := time.monotonic()) - self._started
            if now > until:
                raise WorldError(
                    f"{self._peer} did not give {self._description} in {waited_s:.1f} s; is its host reachable?"
                )
            # A tenth of the time so far: short reads are noticed soon, and long ones leave the core to NIXL's thread.
            time.sleep(min(max(waited_s / 10, _SHORTEST_SLEEP_S), _LONGEST_SLEEP_S))


class Agent:
    """The agent of a process, for all its threads. `name` is host, process and a random number."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.name = f"{socket.gethostname()}/{os.getpid()}/{secrets.token_hex(4)}"
        self._nixl, self._errors = _load_bindings()
        self._agent = self._create_agent()
        self._registered: dict[Span, object] = {}
        self._temporary: dict[Span, int] = {}
        self._in_flight: dict[int, tuple[torch.Tensor, Span | None]] = {}
        self._closed_pages: list[mmap.mmap] = []
        self._peers: set[str] = {self.name}
        self._lock = threading.RLock()

    def register(self, span: Span, memory: object) -> None:
        """Let peers read a span, and reads write into it; `memory`, which owns it, is kept alive."""
        if span in self._registered:
            raise UserError("this memory is a window already; use that one")
        self._register(span)
        self._registered[span] = memory

    def deregister(self, span: Span, pages: mmap.mmap | None) -> None:
        """Let peers not read a span any more. `pages`, if the window owns them, become zero but stay mapped."""
        if self._agent is None:
            return
        self._registered.pop(span)
        self._agent.deregisterMem(self._registration(span))
        if pages:
            pages.madvise(mmap.MADV_DONTNEED)
            self._closed_pages.append(pages)

    def metadata(self, span: Span) -> bytes:
        """Return what a peer's agent needs to reach this one and to read the span."""
        return bytes(self._live().getLocalPartialMD(self._registration(span), True))

    def add_peer(self, peer: str, first: bytes, then: bytes) -> None:
        """Load the metadata of an agent, `first`, unless they are loaded, and of one window of it, `then`."""
        if peer == self.name:
            return
        with self._lock:
            try:
                for metadata in (then,) if peer in self._peers else (first, then):
                    self._live().loadRemoteMD(metadata)
            except self._errors as error:
                self._remove_peer(peer)
                raise WorldError(f"{peer} cannot be reached: {error}; is its process alive?") from error
            self._peers.add(peer)

    def start_read(self, peer: str, description: str, source: Span, into: torch.Tensor) -> PendingRead:
        """Start to read a peer's memory."""
        if not source.size:
            return PendingRead(self, peer, description, None)
        target = Span.of(into)
        temporary = None if any(span.holds(target) for span in tuple(self._registered)) else target
        self._register_temporarily(temporary)
        try:
            return PendingRead(self, peer, description, self._post(peer, source, into, temporary))
        except self._errors as error:
            self._deregister_temporary(temporary)
            self._remove_peer(peer)
            raise WorldError(f"{peer} cannot give {description}: {error}; is its process alive?") from error

    def is_complete(self, request: int, peer: str, description: str) -> bool:
        """Return whether a read is complete; raise WorldError if it never will be."""
        try:
            if self._live().getXferStatus(request) == self._nixl.NIXL_IN_PROG:
                return False
        except self._errors as error:
            self._release(request)
            self._remove_peer(peer)
            raise WorldError(f"{peer} was lost while it gave {description}: {error}; is its process alive?") from error
        self._release(request)
        return True

    def close(self) -> None:
        """Release all requests and end NIXL; peers cannot read from this process any more."""
        if self._agent is None:
            return
        unfinished = list(self._in_flight.values())
        for request in tuple(self._in_flight):
            self._release(request)
        for peer in self._peers - {self.name}:
            self._remove_peer(peer)
        # NIXL ends its thread with its last reference; only then nothing writes into unfinished tensors any more.
        self._agent = None
        unfinished.clear()
        self._closed_pages.clear()

    def _post(self, peer: str, source: Span, into: torch.Tensor, temporary: Span | None) -> int:
        agent, nixl = self._live(), self._nixl
        request: int = agent.createXferReq(nixl.NIXL_READ, self._transfer(Span.of(into)), self._transfer(source), peer)
        try:
            agent.postXferReq(request)
        except self._errors:
            agent.releaseXferReq(request)
            raise
        self._in_flight[request] = into, temporary
        return request

    def _release(self, request: int) -> None:
        _, temporary = self._in_flight.pop(request)
        with suppress(*self._errors):
            self._live().releaseXferReq(request)
        self._deregister_temporary(temporary)

    def _register_temporarily(self, span: Span | None) -> None:
        """Register memory for a read, unless another read into it has done so."""
        with self._lock:
            if span:
                if span not in self._temporary:
                    self._register(span)
                self._temporary[span] = self._temporary.get(span, 0) + 1

    def _deregister_temporary(self, span: Span | None) -> None:
        with self._lock:
            if span:
                self._temporary[span] -= 1
                if not self._temporary[span]:
                    self._temporary.pop(span)
                    self._live().deregisterMem(self._registration(span))

    def _remove_peer(self, peer: str) -> None:
        """Forget a lost agent, so that its metadata are loaded again if a window of it is opened again."""
        with self._lock, suppress(*self._errors):
            self._peers.discard(peer)
            self._live().invalidateRemoteMD(peer)

    def _register(self, span: Span) -> None:
        try:
            self._live().registerMem(self._registration(span))
        except self._errors as error:
            raise WorldError(
                f"NIXL cannot register {span.size} bytes: {error}; is the limit of locked memory (ulimit -l) too low?"
            ) from error

    def _live(self) -> Any:
        if self._agent is None:
            raise UserError("the NIXL windows of this process are closed; create new ones with NixlWindows()")
        return self._agent

    def _create_agent(self) -> Any:
        config = self._nixl.nixlAgentConfig()
        config.useProgThread = True
        config.pthrDelay = _PROGRESS_DELAY_US
        config.syncMode = self._nixl.NIXL_THREAD_SYNC_STRICT
        try:
            agent = self._nixl.nixlAgent(self.name, config)
            agent.createBackend("UCX", _ucx_settings())
        except self._errors as error:
            raise WorldError(f"NIXL cannot start UCX: {error}; does UCX_TLS name transports of this host?") from error
        return agent

    def _registration(self, span: Span) -> Any:
        return self._nixl.nixlRegDList(self._memory(span), [(span.address, span.size, max(span.gpu, 0), "")])

    def _transfer(self, span: Span) -> Any:
        return self._nixl.nixlXferDList(self._memory(span), [(span.address, span.size, max(span.gpu, 0))])

    def _memory(self, span: Span) -> Any:
        return self._nixl.DRAM_SEG if span.gpu < 0 else self._nixl.VRAM_SEG


def _ucx_settings() -> dict[str, str]:
    """Return UCX settings that differ from its defaults, unless the user has set them."""
    key, value = _TCP_SEGMENT
    return {} if f"UCX_{key}" in os.environ else {"engine_config": f"{key}={value}"}


def _load_bindings() -> tuple[Any, tuple[type[Exception], ...]]:
    """Return NIXL's bindings and the exceptions that they raise."""
    try:
        import_module("nixl")
    except ImportError as error:
        raise UserError(f"NIXL is not installed ({error}); run pip install 'mimatrix[nixl]'") from error
    bindings = import_module("nixl._bindings")
    errors = [value for value in vars(bindings).values() if isinstance(value, type) and issubclass(value, Exception)]
    return bindings, tuple(errors)
