"""The shard server: one process on each group's host that holds parameter shards. It is not the job server.

Every shard has a replica on another host. A push is applied on both before it is acknowledged and before a group can
pull it, so losing one server loses nothing that a group was told of. A group that cannot reach a shard's server turns
to the replica, which becomes the primary. The old primary, if it is still alive, is told with its next push, and
redirects its clients. A server whose shard has no replica copies it to another server, if there is one.

A client that needs all shards with the same pushes applied holds them (`client.consistent_cut`). Its holds, and copies
that it has not fetched yet, end with its connection.
"""

import logging
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch

from mimatrix.core.errors import MiMatrixError, WorldError
from mimatrix.hybrid.net import Address, Connection, Header
from mimatrix.hybrid.server.heartbeat import Heartbeat
from mimatrix.hybrid.server.listener import Listener
from mimatrix.hybrid.server.push_log import Push
from mimatrix.hybrid.server.replication import Replica, Replicas
from mimatrix.hybrid.server.shard import MovedError, Shard
from mimatrix.hybrid.server.state import ShardState

logger = logging.getLogger(__name__)
MakeShard = Callable[[int, ShardState], Shard]
"""Makes a shard from its number and state."""
ServerReply = tuple[Header, torch.Tensor | None]


@dataclass(frozen=True)
class _Request:
    """A message for one shard."""

    shard: Shard
    header: Header
    values: torch.Tensor | None
    connection: Connection

    @property
    def is_replicated(self) -> bool:
        """Whether a primary sent it to this replica."""
        return bool(self.header.get("replicated"))


class ShardServer:
    """Serves shards on a listening socket: groups push and pull, other servers replicate.

    Args:
        listener: A listening socket, which the server closes.
        address: How groups and other servers reach it.
        shards: The shards by number, primaries and replicas.
        token: The secret of the run; other clients are refused.
        timeout_s: For requests to replicas.
        make_shard: Makes replicas of further shards; None: they are refused.
    """

    def __init__(
        self,
        listener: socket.socket,
        address: Address,
        shards: Mapping[int, Shard],
        token: str,
        *,
        timeout_s: float = 30.0,
        make_shard: MakeShard | None = None,
    ) -> None:
        self._listener = Listener(listener, token, self._serve)
        self._heartbeat = Heartbeat()
        self.address, self._shards, self._make_shard = address, dict(shards), make_shard
        self._primaries: set[int] = set()
        """Shards that groups address here; all others are replicas."""
        self.left: set[int] = set()
        """Groups that have left for good."""
        self.replicas = Replicas(address, token, timeout_s)
        self._groups: dict[Connection, int] = {}
        self._copies: dict[Connection, ShardState] = {}
        """Copies of shards that their clients will fetch."""
        self._shard_handlers: dict[str, Callable[[_Request], ServerReply]] = {
            "push": self._on_push,
            "pull": self._on_pull,
            "hold": self._on_hold,
            "copy": self._on_copy,
            "release": self._on_release,
            "fetch": self._on_fetch,
            "join": self._on_join,
            "load": self._on_load,
        }
        self._server_handlers: dict[str, Callable[[Header, torch.Tensor | None], Header]] = {
            "leave": self._on_leave,
            "replicate": self._on_replicate,
            "set_peers": self._on_set_peers,
            "welcome": self._on_welcome,
            "store_replica": self._on_store_replica,
        }

    @classmethod
    def open(
        cls,
        shards: Mapping[int, Shard],
        token: str,
        host: str = "127.0.0.1",
        *,
        timeout_s: float = 30.0,
        make_shard: MakeShard | None = None,
    ) -> "ShardServer":
        """Listen on a free port of `host` and start serving."""
        listener = socket.create_server((host, 0), backlog=256)
        address = Address(host, listener.getsockname()[1])
        server = cls(listener, address, shards, token, timeout_s=timeout_s, make_shard=make_shard)
        server.start()
        return server

    def start(self) -> None:
        """Accept connections, in threads."""
        self._heartbeat.start()
        self._listener.start()

    @property
    def connected_groups(self) -> int:
        """How many connections groups have; servers do not count, or they would keep each other alive."""
        return len(self._groups)

    def close(self) -> None:
        """Stop listening and close all connections."""
        self._listener.close()
        self._heartbeat.stop()
        self.replicas.close()

    def _serve(self, connection: Connection, hello: Header) -> None:
        """Answer the requests of one client, in order, until it leaves."""
        try:
            with self._heartbeat.cover(connection):
                connection.negotiate(hello)
            if hello.get("group") is not None:
                self._groups[connection] = int(hello["group"])
                self.left.discard(int(hello["group"]))
            while not self._listener.is_closing:
                header, values = connection.receive()
                with self._heartbeat.cover(connection):
                    reply = self._handle(connection, header, values)
                connection.send(*reply)
        finally:
            self._groups.pop(connection, None)
            self._copies.pop(connection, None)
            for shard in list(self._shards.values()):
                shard.release(connection)

    def _handle(self, connection: Connection, header: Header, values: torch.Tensor | None) -> ServerReply:
        try:
            if handler := self._server_handlers.get(header["type"]):
                return handler(header, values), None
            number = header["shard"]
            shard = self._shards.get(number)
            if shard is None or (header.get("replicated") and number in self._primaries):
                return {"moved": True}, None
            if number not in self._primaries and shard.log.version < header.get("min_version", 0):
                return {"moved": True}, None  # a replica that was given up without noticing
            if not header.get("replicated"):
                self._primaries.add(number)
            return self._shard_handlers[header["type"]](_Request(shard, header, values, connection))
        except MovedError:
            return {"moved": True}, None
        except (MiMatrixError, OSError) as error:
            return {"error": str(error)}, None
        except Exception as error:  # the client gets the error and does not retry
            logger.exception("a request failed in the shard server")
            return {"error": f"the shard server failed: {type(error).__name__}: {error}"}, None

    def _on_leave(self, header: Header, _: torch.Tensor | None) -> Header:
        self.left.add(header["group"])
        return {}

    def _on_replicate(self, header: Header, _: torch.Tensor | None) -> Header:
        """Set the peers, and the one that has the replica of this server's shard."""
        self._on_set_peers(header | {"groups": len(header["addresses"])}, None)
        self.replicas.attach(header["shard"], self.replicas.addresses[header["at"]])
        return {}

    def _on_set_peers(self, header: Header, _: torch.Tensor | None) -> Header:
        self.replicas.set_peers([Address(*address) for address in header["addresses"]], header["groups"])
        return {}

    def _on_welcome(self, header: Header, _: torch.Tensor | None) -> Header:
        peers = self.replicas.add_peer(Address(*header["address"]))
        return {"addresses": [address.to_json() for address in peers]}

    def _on_store_replica(self, header: Header, values: torch.Tensor | None) -> Header:
        if values is None or self._make_shard is None:
            raise WorldError("the shard server does not accept replicas; use another server")
        number, state = header["shard"], ShardState.from_tensor(values)
        current = self._shards.get(number)
        # A primary that was taken for lost must not undo what its successor has acknowledged since.
        if current and not current.retire(state.log):
            raise MovedError(f"shard {number} moved, and has applied other pushes since")
        self._shards[number] = self._make_shard(number, state)
        self._primaries.discard(number)
        return {}

    def _on_push(self, request: _Request) -> ServerReply:
        header, values = request.header, request.values
        assert values is not None
        push = Push(
            group=header["group"],
            number=header["number"],
            samples=header["samples"],
            nominal_samples=header["nominal_samples"],
            base_version=header["base_version"],
            incarnation=header["incarnation"],
        )
        applied = request.shard.push(
            push,
            values,
            header["hyperparameters"],
            header["without_grad"],
            replication=partial(self._replication, request),
        )
        outcome: Header = {
            "staleness": applied.staleness,
            "is_duplicate": applied.is_duplicate,
            "waited_s": applied.waited_s,
        }
        if request.is_replicated:
            return outcome, None
        newest, values = self._on_pull(request)
        return outcome | newest, values

    def _on_pull(self, request: _Request) -> ServerReply:
        snapshot = request.shard.pull()
        clocks = {str(group): request.shard.log.pushes.get(group, 0) for group in self._active_groups()}
        reply: Header = {"version": snapshot.version, "samples": snapshot.samples, "clocks": clocks}
        if address := self.replicas.address_of(request.header["shard"]):
            reply["replica"] = address.to_json()
        return reply, snapshot.values

    def _active_groups(self) -> set[int]:
        return set(self._groups.copy().values()) - self.left

    def _on_hold(self, request: _Request) -> ServerReply:
        if request.is_replicated:
            return {}, None
        with self._replication(request):
            pass  # raises MovedError if the replica has become the primary, which must be held instead
        log = request.shard.hold(request.connection, request.header["lease_s"], request.header["timeout_s"])
        connected = sorted(self._active_groups())
        return {"log": log.to_json(), "origin": request.shard.origin, "connected": connected}, None

    def _on_copy(self, request: _Request) -> ServerReply:
        header = request.header
        admitted = {int(group): int(number) for group, number in header["admitted"].items()}
        self._copies[request.connection] = request.shard.copy_at(
            request.connection, admitted, header["disconnected"], header["timeout_s"]
        )
        return {}, None

    def _on_release(self, request: _Request) -> ServerReply:
        request.shard.release(request.connection)
        return {}, None

    def _on_fetch(self, request: _Request) -> ServerReply:
        copy = self._copies.pop(request.connection, None)
        if copy is None:
            raise WorldError("the copy of a shard is gone; try again")
        return {}, copy.to_tensor()

    def _on_join(self, request: _Request) -> ServerReply:
        header = request.header
        request.shard.join(
            header["group"], header["number"], header["incarnation"], partial(self._replication, request)
        )
        return {}, None

    def _on_load(self, request: _Request) -> ServerReply:
        assert request.values is not None
        state = ShardState.from_tensor(request.values)
        owner = None if request.is_replicated else request.connection
        request.shard.load(state, partial(self._replication, request), owner)
        return {}, None

    @contextmanager
    def _replication(self, request: _Request) -> Iterator[None]:
        """Forward the request to the replica on entry; wait for its acknowledgement on exit."""
        number = request.header["shard"]
        try:
            replica = None if request.is_replicated else self.replicas.ensure(number, request.shard)
            with replica.lock if replica else nullcontext():
                error = replica.send(request.header, request.values) if replica else None
                try:
                    yield
                finally:
                    if replica:
                        self._wait_ack(number, replica, error)
        except MovedError:
            self._retire(number, request.shard)
            raise

    def _retire(self, number: int, shard: Shard) -> None:
        """Stop serving a shard that is served elsewhere, also to requests that wait for their turn."""
        shard.retire()
        if self._shards.get(number) is shard:
            del self._shards[number]
            self._primaries.discard(number)
            self.replicas.forget(number)

    def _wait_ack(self, number: int, replica: Replica, error: Exception | None) -> None:
        """Wait for the replica's acknowledgement; drop the replica if it does not answer."""
        try:
            if error:
                raise error
            replica.wait_ack()
        except MovedError:
            raise
        except (OSError, WorldError) as lost:
            self.replicas.drop(number, lost)
