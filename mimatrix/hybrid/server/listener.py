"""The listening socket of a shard server: who is let in, and how many. For strangers next to nothing is spent."""

import logging
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from mimatrix.core.errors import MiMatrixError
from mimatrix.hybrid.net import Connection, Header, local_capabilities
from mimatrix.hybrid.stream import GREETING_S, SILENCE_S, shows_secret

logger = logging.getLogger(__name__)
_MAX_STRANGERS = 64
"""Connections that have not shown the secret yet; a client does so at once."""
_MAX_PEERS = 1024
_RETRY_S = 0.05


class Listener:
    """Accepts connections, and serves each client that shows the secret on a thread of its own.

    Args:
        raw: A listening socket, which the listener closes.
        token: The secret of the run.
        serve: Serves one client until it leaves; gets the connection and what the client says of itself.
    """

    def __init__(self, raw: socket.socket, token: str, serve: Callable[[Connection, Header], None]) -> None:
        self._raw, self._token, self._serve = raw, token, serve
        self._strangers: dict[socket.socket, None] = {}
        """The oldest first."""
        self._peers: set[Connection] = set()
        self._refused = 0
        self._lock, self._closing = threading.Lock(), threading.Event()

    @property
    def is_closing(self) -> bool:
        """Whether the listener is closed, or about to be."""
        return self._closing.is_set()

    def start(self) -> None:
        """Accept connections, in a thread."""
        threading.Thread(target=self._accept_until_closed, name="mimatrix-shards", daemon=True).start()

    def close(self) -> None:
        """Stop listening and close all connections."""
        self._closing.set()
        _shut_down(self._raw)
        self._raw.close()
        with self._lock:
            strangers, peers = list(self._strangers), list(self._peers)
        for raw in strangers:
            _shut_down(raw)
        for connection in peers:
            connection.close()

    def _accept_until_closed(self) -> None:
        is_told = False
        while not self._closing.is_set():
            try:
                self._admit(self._raw.accept()[0])
                is_told = False
            except Exception as error:  # noqa: BLE001 (no descriptor or no thread for a moment: later there will be)
                if not is_told and not self._closing.is_set():
                    logger.warning(
                        "the shard server cannot accept connections now (%s), and keeps trying; raise the limits of "
                        "open files and processes",
                        error,
                    )
                is_told = True
                self._closing.wait(_RETRY_S)

    def _admit(self, raw: socket.socket) -> None:
        """Start a thread that waits for the secret; if too many wait, the one that has waited longest is closed."""
        with self._lock:
            self._strangers[raw] = None
            oldest = next(iter(self._strangers)) if len(self._strangers) > _MAX_STRANGERS else None
            if oldest:
                del self._strangers[oldest]
        if oldest:
            _shut_down(oldest)  # its thread closes it
        try:
            threading.Thread(target=self._run, args=(raw,), name="mimatrix-shard", daemon=True).start()
        except BaseException:
            self._strangers.pop(raw, None)
            raw.close()
            raise

    def _run(self, raw: socket.socket) -> None:
        """Serve one connection to its end; whatever goes wrong, only this connection ends."""
        connection: Connection | None = None
        try:
            is_known = shows_secret(raw, self._token, GREETING_S)
            connection = Connection(raw, None)
            if not is_known:
                self._refuse(connection, "the shard server belongs to another run, or has another version; check both")
            elif not self._enter(raw, connection):
                self._refuse(connection, f"the shard server has {_MAX_PEERS} clients already; close some")
            else:
                self._greet_and_serve(connection)
        except (OSError, MiMatrixError) as error:
            logger.debug("a connection ended: %s", error)  # a client that is gone may connect again
        except Exception:
            if not self._closing.is_set():
                logger.exception("a connection is closed after an unexpected error; the shard server continues")
        finally:
            self._leave(raw, connection)

    def _greet_and_serve(self, connection: Connection) -> None:
        connection.send(local_capabilities())
        hello, _ = connection.receive(SILENCE_S)
        self._serve(connection, hello)

    def _enter(self, raw: socket.socket, connection: Connection) -> bool:
        with self._lock:
            self._strangers.pop(raw, None)
            if len(self._peers) < _MAX_PEERS and not self._closing.is_set():
                self._peers.add(connection)
            return connection in self._peers

    def _leave(self, raw: socket.socket, connection: Connection | None) -> None:
        with self._lock:
            self._strangers.pop(raw, None)
            if connection:
                self._peers.discard(connection)
        if connection:
            connection.close()
        raw.close()

    def _refuse(self, connection: Connection, reason: str) -> None:
        """Close a connection with a sentence; the log has the first, the second, the fourth, and so on."""
        with self._lock:
            self._refused += 1
            refused = self._refused
        if refused & (refused - 1) == 0:
            logger.warning("connections refused so far: %d (%s)", refused, reason)
        connection.send({"error": reason})


def _shut_down(raw: socket.socket) -> None:
    with suppress(OSError):
        raw.shutdown(socket.SHUT_RDWR)
