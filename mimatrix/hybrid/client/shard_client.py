"""The client of one shard: it follows the shard from its server to its replicas (`server.replication`)."""

import time
from collections.abc import Sequence
from contextlib import suppress

import torch

from mimatrix.core.errors import WorldError
from mimatrix.hybrid.net import Address, Connection, Header, connect

_RETRY_S = 0.1


class _MovedError(ConnectionError):
    """The server answers, and does not have the shard any more."""


class ShardClient:
    """Sends requests to one shard.

    Args:
        group: The group that this client makes count as connected; None for a client that does not count.
        shard: The number of the shard.
        addresses: Where the shard may be, in order.
        token: The secret of the run.
        timeout_s: How long each address may take to answer.
    """

    def __init__(
        self, group: int | None, shard: int, addresses: Sequence[Address], token: str, timeout_s: float
    ) -> None:
        self._group, self._shard, self._addresses = group, shard, list(addresses)
        self._token, self.timeout_s = token, timeout_s
        self._connection: Connection | None = None
        self._version = 0
        """The newest version seen; a server that has an older one has lost the shard."""
        self._is_closed = False

    def clone(self) -> "ShardClient":
        """Return a second client of the same shard, with its own connection, that does not count as connected."""
        client = ShardClient(None, self._shard, self._addresses, self._token, self.timeout_s)
        client._version = self._version
        return client

    def pull(self) -> tuple[Header, torch.Tensor]:
        """Return the newest parameters."""
        reply, values = self.request({"type": "pull"})
        return reply, torch.empty(0) if values is None else values

    def push(self, header: Header, values: torch.Tensor) -> tuple[Header, torch.Tensor]:
        """Push a gradient; return the outcome and the newest parameters."""
        reply, newest = self.request(header, values)
        return reply, torch.empty(0) if newest is None else newest

    def request(self, header: Header, values: torch.Tensor | None = None) -> tuple[Header, torch.Tensor | None]:
        """Send a request and return the reply, trying one address after the other.

        A push may arrive twice; the shard recognises it by its number.

        Raises:
            WorldError: The server refused the request, or no address answered in time.
        """
        deadline, last_error, is_retry = time.monotonic() + self.timeout_s, "", False
        addressed = header | {"shard": self._shard}
        while not self._is_closed and self._addresses and time.monotonic() < deadline:
            try:
                return self._try_first_address(addressed | {"min_version": self._version}, values)
            except OSError as error:
                last_error = str(error) or type(error).__name__
                # A server that is there may have closed the connection only: the replica is for one that is not.
                is_retry = not is_retry and self._connection is not None and _may_be_there(error)
                self._disconnect()
                if is_retry:
                    continue
                if len(self._addresses) > 1:
                    self._addresses.pop(0)
                    deadline = time.monotonic() + self.timeout_s
                else:
                    time.sleep(_RETRY_S)
        where = str(self._addresses[0]) if self._addresses else "any address"
        raise WorldError(
            f"shard {self._shard} does not answer at {where} ({last_error}), and neither does its replica; restart the "
            "run from its last checkpoint"
        )

    def _try_first_address(self, header: Header, values: torch.Tensor | None) -> tuple[Header, torch.Tensor | None]:
        self._connection = self._connection or connect(
            self._addresses[0], self._token, self.timeout_s, group=self._group
        )
        reply, returned = _exchange(self._connection, header, values)
        self._update(reply)
        return reply, returned

    def _disconnect(self) -> None:
        if self._connection:
            self._connection.close()
        self._connection = None

    def _update(self, reply: Header) -> None:
        """Remember the shard's version, and where its replica is."""
        self._version = max(self._version, int(reply.get("version", 0)))
        if "replica" in reply:
            replica = Address(*reply["replica"])
            current, *others = self._addresses
            self._addresses = [current, replica, *(address for address in others if address != replica)]

    def close(self) -> None:
        """Close the connection; a client that counts for its group announces that the group leaves."""
        self._is_closed = True
        if self._connection:
            if self._group is not None:
                with suppress(OSError, WorldError):
                    _exchange(self._connection, {"type": "leave", "group": self._group}, None)
            self._disconnect()


def _may_be_there(error: OSError) -> bool:
    """Return whether the server may answer on a new connection; one that was silent, or has the shard no more, no."""
    return isinstance(error, ConnectionError) and not isinstance(error, _MovedError)


def _exchange(
    connection: Connection, header: Header, values: torch.Tensor | None
) -> tuple[Header, torch.Tensor | None]:
    connection.send(header, values)
    reply, returned = connection.receive()
    if "moved" in reply:
        raise _MovedError("the shard moved to its replica")
    if "error" in reply:
        raise WorldError(str(reply["error"]))
    return reply, returned
