"""The replica of each shard, and a new one when it is lost.

Every shard has an order of servers: the groups' own servers from the shard's on, round to the one before it, then
servers that were added later, in the order in which they came. A shard is replicated to the next live server of its
order. So a client finds a shard at the first server of the order that has it.
"""

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mimatrix.core.errors import WorldError
from mimatrix.hybrid.net import Address, Connection, Header, connect
from mimatrix.hybrid.server.shard import MovedError, Shard
from mimatrix.hybrid.server.state import ShardState

logger = logging.getLogger(__name__)
_RETRY_S, _MAX_RETRY_S = 0.1, 60.0
_RETRY_PER_ATTEMPT = 20
"""A pause lasts this many times as long as the attempt before it."""


@dataclass(slots=True)
class _LostServer:
    """A server that failed as a replica. It may have been slow only, so it is tried again when no other is left."""

    attempts: int = 0
    retry_at_s: float = 0.0

    def note_attempt(self, took_s: float) -> None:
        """Wait before the next attempt, so that pushes spend little time on attempts to reach a silent host."""
        self.attempts += 1
        pause_s = min(_MAX_RETRY_S, _RETRY_S * 2 ** min(self.attempts, 16))
        self.retry_at_s = time.monotonic() + max(_RETRY_PER_ATTEMPT * took_s, pause_s)


def replica_order(shard: int, addresses: Sequence[Address], groups: int) -> list[Address]:
    """Return the servers at which to look for a shard, in order; the first `groups` addresses are the groups' own."""
    own = addresses[:groups]
    return [*own[shard:], *own[:shard], *addresses[groups:]]


class Replica:
    """The replica of one shard, as its primary server sees it."""

    def __init__(self, shard: int, address: Address, connection: Connection) -> None:
        self.address = address
        self._shard, self._connection = shard, connection
        self.lock = threading.Lock()
        """Held from `send` until `wait_ack` has returned."""

    @classmethod
    def connect(cls, shard: int, address: Address, token: str, timeout_s: float) -> "Replica":
        """Connect to the server that holds the replica."""
        return cls(shard, address, connect(address, token, timeout_s))

    def initialize(self, state: ShardState) -> None:
        """Copy the whole state to the replica and wait until it is there."""
        error = self.send({"type": "store_replica", "shard": self._shard}, state.to_tensor())
        if error:
            raise error
        self.wait_ack()

    def send(self, header: Header, values: torch.Tensor | None) -> Exception | None:
        """Forward a request without waiting; return the error if the connection is lost, otherwise call `wait_ack`."""
        try:
            self._connection.send(header | {"replicated": True}, values)
        except OSError as error:
            return error
        return None

    def wait_ack(self) -> None:
        """Wait until the replica has applied what was sent."""
        reply, _ = self._connection.receive()
        if "moved" in reply:
            raise MovedError(f"shard {self._shard} moved to its replica")
        if "error" in reply:
            raise WorldError(str(reply["error"]))

    def close(self) -> None:
        """Close the connection; the replica itself stays."""
        self._connection.close()


class Replicas:
    """The replicas of the shards of one server, which listens at `own`."""

    def __init__(self, own: Address, token: str, timeout_s: float) -> None:
        self._own, self._token, self._timeout_s = own, token, timeout_s
        self._replicas: dict[int, Replica] = {}
        self._lost: dict[Address, _LostServer] = {}
        self._groups = 0
        self.addresses: list[Address] = []
        """All known servers."""
        self._lock = threading.Lock()

    def attach(self, shard: int, address: Address) -> None:
        """Replicate a shard to a server that has the same state already."""
        self._replicas[shard] = self._connect(shard, address)

    def set_peers(self, addresses: Sequence[Address], groups: int) -> None:
        """Set all servers, in the order of the groups; the first `groups` are the groups' own."""
        self.addresses, self._groups = list(addresses), groups

    def add_peer(self, address: Address) -> list[Address]:
        """Add a server and return all known ones."""
        with self._lock:
            if address not in self.addresses:
                self.addresses.append(address)
            return list(self.addresses)

    def ensure(self, number: int, shard: Shard) -> Replica | None:
        """Return the replica of a shard; if it was lost, copy the shard to the next live server first, if any."""
        replica = self._replicas.get(number)
        if replica or not self._candidates(number):
            return replica
        with shard.locked_state() as state, self._lock:
            if state is not None and number not in self._replicas:
                self._create(number, state)
            return self._replicas.get(number)

    def address_of(self, number: int) -> Address | None:
        """Return where the replica of a shard is, if it has one."""
        replica = self._replicas.get(number)
        return replica.address if replica else None

    def drop(self, number: int, error: Exception) -> None:
        """Give up the replica of a shard, which does not answer."""
        replica = self._replicas.pop(number, None)
        if replica:
            replica.close()
            self._lost.setdefault(replica.address, _LostServer())
        logger.warning("shard %d has lost its replica (%s); it has a single copy until it is replicated", number, error)

    def forget(self, number: int) -> None:
        """Close the connection to the replica of a shard that this server does not serve any more."""
        replica = self._replicas.pop(number, None)
        if replica:
            replica.close()

    def close(self) -> None:
        """Close the connections to all replicas."""
        for replica in self._replicas.copy().values():
            replica.close()

    def _candidates(self, number: int) -> list[Address]:
        """Return where a replica may be put, behind this server in the shard's order; then one that was lost before."""
        order = replica_order(number, self.addresses, self._groups)
        behind = order[order.index(self._own) + 1 :] if self._own in order else []
        now_s = time.monotonic()
        due = [address for address in behind if address in self._lost and self._lost[address].retry_at_s <= now_s]
        return [address for address in behind if address not in self._lost] + due[:1]

    def _create(self, number: int, state: ShardState) -> None:
        for address in self._candidates(number):
            started_s = time.monotonic()
            try:
                self._replicas[number] = self._copy_to(number, address, state)
            except MovedError:
                raise
            except (OSError, WorldError) as error:
                lost = self._lost.setdefault(address, _LostServer())
                if not lost.attempts:
                    logger.warning("shard %d cannot be replicated at %s (%s)", number, address, error)
                lost.note_attempt(time.monotonic() - started_s)
            else:
                self._lost.pop(address, None)
                logger.info("shard %d has a replica again, at %s", number, address)
                return

    def _copy_to(self, number: int, address: Address, state: ShardState) -> Replica:
        replica = self._connect(number, address)
        try:
            replica.initialize(state)
        except BaseException:
            replica.close()
            raise
        return replica

    def _connect(self, shard: int, address: Address) -> Replica:
        # A silent replica is given up before the clients that wait for it give up.
        return Replica.connect(shard, address, self._token, self._timeout_s / 3)
