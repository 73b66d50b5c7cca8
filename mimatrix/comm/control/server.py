"""The connections of ranks to the coordinator: who may speak, what has come in, what has to go out. One thread.

A stranger costs a descriptor and a few bytes for a few seconds: until a connection has shown the job's token, nothing
but its greeting is read. What goes wrong with one connection ends that connection and no other.
"""

import hmac
import logging
import selectors
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

from mimatrix.comm.control.faults import Fault
from mimatrix.comm.control.liveness import DEFAULT_SILENCE_S, describe_break, watch_host
from mimatrix.comm.control.messages import (
    GREETING_BYTES,
    ControlMessage,
    Decoder,
    MessageType,
    close_in_children,
    greeting,
)
from mimatrix.core.errors import WorldError

_logger = logging.getLogger(__name__)
_TICK_S = 0.05
_READ_BYTES = 1 << 16
_CLOSED = "its connection closed"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits:
    """What a server bears."""

    greeting_s: float = 5.0
    """How long a connection may take to show the token."""
    max_strangers: int = 256
    """Connections that have not shown the token; with one more, the oldest is closed."""
    accept_pause_s: float = 0.05
    """How long nothing is accepted if there is no descriptor for a connection."""
    max_unread_bytes: int = 16 << 20
    """What may wait for a rank that does not read; with more, it is lost."""
    idle_s: float = 0.05
    """How often the server wakes up if nothing happens and no deadline is to be kept."""
    silence_s: float = DEFAULT_SILENCE_S
    """After how long without an answer of its kernel a host is silent."""


class ControlHandler(Protocol):
    """What decides, on the thread of the server."""

    def on_join(self, rank: int, host: str) -> None:
        """Take note that a rank has connected."""
        ...

    def on_message(self, rank: int, message: ControlMessage) -> None:
        """Handle a message; an exception closes the connection of its sender."""
        ...

    def on_leave(self, rank: int, reason: str) -> None:
        """Take note that the connection of a rank has ended."""
        ...

    def on_tick(self) -> None:
        """Look at deadlines; called after all that has come in, and in between while there are deadlines."""
        ...

    @property
    def has_deadlines(self) -> bool:
        """Whether something is to be decided soon, even if no message comes."""
        ...


@dataclass(slots=True, eq=False)
class _RankConnection:
    """One connection: a stranger until it has shown the token, and without a rank until it has said which it is."""

    stream: socket.socket
    decoder: Decoder
    until_s: float
    greeting: bytes = b""
    unsent: bytearray = field(default_factory=bytearray)
    rank: int = -1

    @property
    def is_closed(self) -> bool:
        """Whether it was dropped."""
        return self.stream.fileno() < 0


class ControlServer:
    """Accepts connections, and passes messages of ranks to a handler until it is told to stop."""

    def __init__(
        self, listener: socket.socket, token: str, generation: int, world_size: int, limits: ServerLimits
    ) -> None:
        self.received, self.sent = 0, 0
        self.joined: set[int] = set()
        """All ranks that have ever connected."""
        self._listener, self._generation, self._world_size, self._limits = listener, generation, world_size, limits
        self._greeting = greeting(token, generation)
        self._strangers: dict[_RankConnection, None] = {}
        self._ranks: dict[int, _RankConnection] = {}
        self._doomed: list[tuple[_RankConnection, str]] = []
        self._accept_again_s = 0.0
        self._selector = selectors.DefaultSelector()
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    @property
    def ranks(self) -> list[int]:
        """The ranks that are connected."""
        return list(self._ranks)

    def serve(self, handler: ControlHandler, is_over: Callable[[], bool]) -> None:
        """Serve until `is_over`. If anything but a connection fails, all ranks are told before the error is raised."""
        try:
            while not is_over():
                for key, events in self._selector.select(self._patience_s(handler)):
                    self._on_event(handler, key, events)
                self._expire()
                handler.on_tick()
                self._drop_doomed(handler)
        except Exception as error:
            _logger.exception("the coordinator failed")
            text = f"the coordinator failed ({type(error).__name__}: {error}); restart the job"
            self.send(self.ranks, MessageType.FAULT, Fault(text=text, ranks=()).to_json())
            raise
        finally:
            self._close()

    def send(self, ranks: Iterable[int], message_type: MessageType, body: dict[str, Any]) -> None:
        """Send a message to those of `ranks` that are connected, without waiting for any of them."""
        frame = ControlMessage(message_type, self._generation, body).encode()
        for rank in ranks:
            if connection := self._ranks.get(rank):
                connection.unsent += frame
                self.sent += 1
                self._flush(connection)

    def dismiss(self, rank: int, reason: str) -> None:
        """Close the connection of a rank after what is being handled now."""
        if connection := self._ranks.get(rank):
            self._doom(connection, reason)

    def _patience_s(self, handler: ControlHandler) -> float:
        is_busy = self._strangers or self._accept_again_s or handler.has_deadlines
        return _TICK_S if is_busy else self._limits.idle_s

    def _on_event(self, handler: ControlHandler, key: selectors.SelectorKey, events: int) -> None:
        if key.fileobj is self._listener:
            self._accept(handler)
            return
        connection = cast(_RankConnection, key.data)
        if not connection.is_closed and events & selectors.EVENT_WRITE:
            self._flush(connection)
        if not connection.is_closed and events & selectors.EVENT_READ:
            self._receive(handler, connection)
        self._drop_doomed(handler)

    def _accept(self, handler: ControlHandler) -> None:
        try:
            stream = close_in_children(self._listener.accept()[0])
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            # There is no descriptor or no memory. The ranks that are connected must not wait for that to pass.
            _logger.warning("no connection can be accepted for a moment (%s)", error.strerror)
            self._selector.unregister(self._listener)
            self._accept_again_s = time.monotonic() + self._limits.accept_pause_s
            return
        connection = _RankConnection(stream, Decoder(self._generation), time.monotonic() + self._limits.greeting_s)
        self._strangers[connection] = None
        if len(self._strangers) > self._limits.max_strangers:
            self._doom(next(iter(self._strangers)), "others came")
        try:
            stream.setblocking(False)
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            watch_host(stream, self._limits.silence_s)
            self._selector.register(stream, selectors.EVENT_READ, connection)
        except (OSError, ValueError):
            self._doom(connection, "it closed at once")
        # A rank sends its greeting at once, so it is mostly here already.
        self._receive(handler, connection)
        self._drop_doomed(handler)

    def _receive(self, handler: ControlHandler, connection: _RankConnection) -> None:
        try:
            if connection in self._strangers:
                self._read_greeting(connection)
                return
            data = connection.stream.recv(_READ_BYTES)
            if not data:
                self._doom(connection, _CLOSED)
                return
            for message in connection.decoder.feed(data):
                self.received += 1
                self._on_message(handler, connection, message)
        except BlockingIOError:
            pass
        except OSError as error:
            self._doom(connection, describe_break(connection.stream, error))
        except WorldError as error:
            self._doom(connection, str(error))
        except Exception as error:  # noqa: BLE001 (one bad message must not end the thread that serves all ranks)
            self._doom(connection, f"a control message is corrupt: {type(error).__name__}: {error}; check its version")

    def _read_greeting(self, connection: _RankConnection) -> None:
        """Read no more than a greeting, and close the connection unless it shows the token."""
        data = connection.stream.recv(GREETING_BYTES - len(connection.greeting))
        connection.greeting += data
        if len(connection.greeting) == GREETING_BYTES and hmac.compare_digest(connection.greeting, self._greeting):
            del self._strangers[connection]
        elif not data or len(connection.greeting) == GREETING_BYTES:
            self._doom(connection, "it did not show the token")

    def _on_message(self, handler: ControlHandler, connection: _RankConnection, message: ControlMessage) -> None:
        if connection.rank >= 0:
            handler.on_message(connection.rank, message)
            return
        match message:
            case ControlMessage(type=MessageType.HELLO, body={"rank": int(rank), "host": str(host)}):
                pass
            case _:
                raise WorldError("a connection begins with another message than HELLO; check its version")
        if not 0 <= rank < self._world_size or rank in self._ranks:
            raise WorldError(f"a connection says that it is rank {rank}, which is connected or not of this job")
        connection.rank = rank
        self._ranks[rank] = connection
        self.joined.add(rank)
        handler.on_join(rank, host)

    def _flush(self, connection: _RankConnection) -> None:
        """Send what the stream takes now, and the rest once it takes more."""
        try:
            while connection.unsent:
                del connection.unsent[: connection.stream.send(connection.unsent)]
        except BlockingIOError:
            pass
        except OSError as error:
            self._doom(connection, describe_break(connection.stream, error))
            return
        if len(connection.unsent) > self._limits.max_unread_bytes:
            self._doom(connection, "it does not read its messages")
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        if self._selector.get_key(connection.stream).events != events:
            self._selector.modify(connection.stream, events, connection)

    def _expire(self) -> None:
        """Close the connections of strangers whose time is over, and accept again after a pause."""
        now_s = time.monotonic()
        for connection in self._strangers:
            if connection.until_s > now_s:
                break
            self._doom(connection, "it did not show the token in time")
        if self._accept_again_s and now_s >= self._accept_again_s:
            self._accept_again_s = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _doom(self, connection: _RankConnection, reason: str) -> None:
        """Have a connection dropped after what is being handled now."""
        self._doomed.append((connection, reason))

    def _drop_doomed(self, handler: ControlHandler) -> None:
        while self._doomed:
            connection, reason = self._doomed.pop(0)
            if connection.is_closed:
                continue
            self._strangers.pop(connection, None)
            with suppress(KeyError):
                self._selector.unregister(connection.stream)
            connection.stream.close()
            if self._ranks.get(connection.rank) is connection:
                del self._ranks[connection.rank]
                handler.on_leave(connection.rank, reason)

    def _close(self) -> None:
        """Close all connections, those of strangers and the listener included."""
        for connection in [*self._strangers, *self._ranks.values()]:
            connection.stream.close()
        self._listener.close()
        self._selector.close()
