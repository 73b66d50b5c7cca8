"""Heartbeats to peers that wait for a busy server, so that they can tell it from one that is gone."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from mimatrix.hybrid.net import Connection

logger = logging.getLogger(__name__)
_INTERVAL_S = 1.0


class Heartbeat:
    """A thread that sends a heartbeat each second to every peer whose request is being handled."""

    def __init__(self) -> None:
        self._waiting: set[Connection] = set()
        self._stopped = threading.Event()

    def start(self) -> None:
        """Start the thread."""
        threading.Thread(target=self._run, name="mimatrix-shard-heartbeat", daemon=True).start()

    def stop(self) -> None:
        """Let the thread end."""
        self._stopped.set()

    @contextmanager
    def cover(self, connection: Connection) -> Iterator[None]:
        """Send heartbeats to a peer while the block runs."""
        self._waiting.add(connection)
        try:
            yield
        finally:
            self._waiting.discard(connection)

    def _run(self) -> None:
        while not self._stopped.wait(_INTERVAL_S):
            for connection in self._waiting.copy():
                try:
                    connection.send_heartbeat()
                except Exception:  # one connection must not end the heartbeats of all others
                    logger.exception("a heartbeat could not be sent")
