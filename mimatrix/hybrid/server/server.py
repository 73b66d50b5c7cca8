"""Serves shards to groups: one service on each group's host, never the job server.

A shard lies twice, on its own host and on another one, its mirror. A push is worked in on both before it is
acknowledged and before anybody can pull it; so whoever is lost, nothing is that somebody was told of. A group that
cannot reach a shard's own host turns to the mirror, which from then on is the shard: the other one, if it still lives,
is told so with its next push, and sends everybody there. Whoever serves a shard without a mirror copies it to another
service, if there is one.

Whoever wants to see all shards with the same pushes in them holds them (`hybrid.marking`). What it holds, and the
copies that it has not fetched yet, end with its connection.
"""

import hmac
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial

import torch

from mimatrix.core.errors import MiMatrixError, WorldError
from mimatrix.hybrid.net import Address, Connection, Header, local_capabilities
from mimatrix.hybrid.server.push_log import Push
from mimatrix.hybrid.server.replication import MovedError, Replica, Replicas
from mimatrix.hybrid.server.shard import Shard
from mimatrix.hybrid.server.state import ShardState

_HELLO_S = 30.0
Say = Callable[[str], None]
MakeShard = Callable[[int, ShardState], Shard]
ServerReply = tuple[Header, torch.Tensor | None]


@dataclass(frozen=True)
class _Request:
    """A message that came, for one shard."""

    shard: Shard
    head: Header
    values: torch.Tensor | None
    stream: Connection

    @property
    def is_mirrored(self) -> bool:
        """Whether it came from the shard to its mirror."""
        return bool(self.head.get("mirrored"))


class ShardServer:
    """Holds some shards and listens: groups push and pull, other services mirror."""

    def __init__(
        self,
        shards: Mapping[int, Shard],
        token: str,
        address: str = "127.0.0.1",
        *,
        timeout_s: float = 30.0,
        say: Say,
        makes: MakeShard | None = None,
    ) -> None:
        self._shards, self._token, self._makes = dict(shards), token, makes
        self._taken_over: set[int] = set()
        """Mirrors that are asked by groups themselves."""
        self.left: set[int] = set()
        """Groups that have said goodbye."""
        self._listener = socket.create_server((address, 0), backlog=256)
        self.place = Address(address, self._listener.getsockname()[1])
        self.mirrors = Replicas(self.place, token, timeout_s, say)
        self._streams: set[Connection] = set()
        self._groups: dict[Connection, int] = {}
        self._copies: dict[Connection, ShardState] = {}
        """Of shards, for those who are to fetch them."""
        self._answers: dict[str, Callable[[_Request], ServerReply]] = {
            "push": self._pushed,
            "pull": self._pulled,
            "hold": self._held,
            "let": self._let,
            "release": self._released,
            "fetch": self._fetched,
            "join": self._joined,
            "put": self._put,
        }
        self._of_services: dict[str, Callable[[Header, torch.Tensor | None], Header]] = {
            "bye": self._left,
            "mirror": self._told_of_mirror,
            "know": self._told_of_places,
            "welcome": self._welcomed,
            "keep": self._kept,
        }
        self._closing = threading.Event()
        threading.Thread(target=self._accept, name="mimatrix-shards", daemon=True).start()

    @property
    def visitors(self) -> int:
        """How many groups are connected; other services do not count, or they would keep each other alive."""
        return len(self._groups)

    def close(self) -> None:
        """No more."""
        self._closing.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for stream in list(self._streams):
            stream.close()
        self.mirrors.close()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                raw, _ = self._listener.accept()
            except OSError:
                return
            stream = Connection(raw, _HELLO_S)
            self._streams.add(stream)
            threading.Thread(target=self._serve, args=(stream,), name="mimatrix-shard", daemon=True).start()

    def _serve(self, stream: Connection) -> None:
        try:
            hello, _ = stream.receive()
            if not hmac.compare_digest(str(hello.get("token", "")), self._token):
                stream.send({"error": "this is a service of another run; it is refused"})
                return
            stream.send(local_capabilities())
            stream.negotiate(hello)
            stream.disable_timeout()
            if hello.get("group") is not None:
                self._groups[stream] = int(hello["group"])
                self.left.discard(int(hello["group"]))
            while not self._closing.is_set():
                stream.send(*self._answer(stream, *stream.receive()))
        except (OSError, ValueError, MiMatrixError):
            pass  # whoever it was is gone, or makes no sense: it may come again
        finally:
            self._streams.discard(stream)
            self._groups.pop(stream, None)
            self._copies.pop(stream, None)
            for shard in list(self._shards.values()):
                shard.release(stream)
            stream.close()

    def _answer(self, stream: Connection, head: Header, values: torch.Tensor | None) -> ServerReply:
        try:
            if told := self._of_services.get(head["what"]):
                return told(head, values), None
            number = head["shard"]
            shard = self._shards.get(number)
            if shard is None or (head.get("mirrored") and number in self._taken_over):
                return {"moved": True}, None
            if number not in self._taken_over and shard.ledger.version < head.get("at_least", 0):
                return {"moved": True}, None  # a mirror that was given up, and knows nothing of it
            if not head.get("mirrored"):
                self._taken_over.add(number)
            return self._answers[head["what"]](_Request(shard, head, values, stream))
        except MovedError:
            return {"moved": True}, None
        except (MiMatrixError, OSError) as error:
            return {"error": str(error)}, None
        except Exception as error:  # noqa: BLE001 (whoever asked is told, and does not ask again)
            return {"error": f"the service failed: {type(error).__name__}: {error}"}, None

    def _left(self, head: Header, _: torch.Tensor | None) -> Header:
        self.left.add(head["group"])
        return {}

    def _told_of_mirror(self, head: Header, _: torch.Tensor | None) -> Header:
        """Of the place where this service's shard lies once more, and of all others."""
        self._told_of_places(head | {"groups": len(head["places"])}, None)
        self.mirrors.begin(head["shard"], self.mirrors.places[head["at"]])
        return {}

    def _told_of_places(self, head: Header, _: torch.Tensor | None) -> Header:
        """Where services are, the groups' own first."""
        self.mirrors.know([Address(*each) for each in head["places"]], head["groups"])
        return {}

    def _welcomed(self, head: Header, _: torch.Tensor | None) -> Header:
        return {"places": [place.to_json() for place in self.mirrors.welcome(Address(*head["place"]))]}

    def _kept(self, head: Header, values: torch.Tensor | None) -> Header:
        """Another service wants its shard to lie here, too."""
        if values is None or self._makes is None:
            raise WorldError("this service keeps no shards of others")
        self._shards[head["shard"]] = self._makes(head["shard"], ShardState.from_bytes(values.numpy().tobytes()))
        self._taken_over.discard(head["shard"])
        return {}

    def _pushed(self, asked: _Request) -> ServerReply:
        head, values = asked.head, asked.values
        assert values is not None
        push = Push(head["group"], head["number"], head["samples"], head["nominal"], head["seen"], head["life"])
        mirrored = partial(self._mirrored, asked)
        found = asked.shard.push(push, values, head["settings"], head["untouched"], mirrored=mirrored)
        told: Header = {"staleness": found.staleness, "again": found.again, "waited_s": found.waited_s}
        if asked.is_mirrored:
            return told, None
        newest, values = self._pulled(asked)
        return told | newest, values

    def _pulled(self, asked: _Request) -> ServerReply:
        pulled = asked.shard.pull()
        clocks = {str(group): asked.shard.ledger.pushes.get(group, 0) for group in self._there()}
        found: Header = {"version": pulled.version, "samples": pulled.samples, "clocks": clocks}
        if place := self.mirrors.place_of(asked.head["shard"]):
            found["mirror"] = place.to_json()
        return found, pulled.values

    def _there(self) -> set[int]:
        return set(self._groups.copy().values()) - self.left

    def _held(self, asked: _Request) -> ServerReply:
        if asked.is_mirrored:
            return {}, None
        with self._mirrored(asked):
            pass  # where the mirror has taken over, it is the one to be held
        ledger = asked.shard.hold(asked.stream, asked.head["lease_s"], asked.head["patience_s"])
        return {"ledger": ledger.to_json(), "origin": asked.shard.origin, "there": sorted(self._there())}, None

    def _let(self, asked: _Request) -> ServerReply:
        head = asked.head
        upto = {int(group): int(number) for group, number in head["upto"].items()}
        self._copies[asked.stream] = asked.shard.let(asked.stream, upto, head["gone"], head["patience_s"])
        return {}, None

    def _released(self, asked: _Request) -> ServerReply:
        asked.shard.release(asked.stream)
        return {}, None

    def _fetched(self, asked: _Request) -> ServerReply:
        copy = self._copies.pop(asked.stream, None)
        if copy is None:
            raise WorldError("there is no copy of the shard any more; try again")
        return {}, torch.frombuffer(bytearray(copy.to_bytes()), dtype=torch.uint8)

    def _joined(self, asked: _Request) -> ServerReply:
        head = asked.head
        asked.shard.join(head["group"], head["number"], head["life"], partial(self._mirrored, asked))
        return {}, None

    def _put(self, asked: _Request) -> ServerReply:
        assert asked.values is not None
        kept = ShardState.from_bytes(asked.values.numpy().tobytes())
        owner = None if asked.is_mirrored else asked.stream
        asked.shard.load(kept, partial(self._mirrored, asked), owner)
        return {}, None

    @contextmanager
    def _mirrored(self, asked: _Request) -> Iterator[None]:
        """Pass it on; over when the mirror has it, too."""
        number = asked.head["shard"]
        mirror = None if asked.is_mirrored else self.mirrors.of(number, asked.shard)
        with mirror.lock if mirror else nullcontext():
            lost = mirror.tell(asked.head, asked.values) if mirror else None
            try:
                yield
            finally:
                if mirror:
                    self._hear(number, mirror, lost)

    def _hear(self, number: int, mirror: Replica, lost: Exception | None) -> None:
        """What the mirror says, if it is there."""
        try:
            if lost:
                raise lost
            mirror.hear()
        except MovedError:
            self._shards.pop(number, None)
            raise
        except (OSError, WorldError) as error:
            self.mirrors.lose(number, error)
