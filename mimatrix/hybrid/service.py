"""Serves shards to groups: one service on each group's host, never the job server.

A shard lies twice, on its own host and on another one, its mirror. A push is worked in on both before it is
acknowledged and before anybody can pull it; so whoever is lost, nothing is that somebody was told of. A group that
cannot reach a shard's own host turns to the mirror, which from then on is the shard: the other one, if it still lives,
is told so with its next push, and sends everybody there.

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

from mimatrix.comm.endpoint import own_host
from mimatrix.core.errors import MiMatrixError, WorldError
from mimatrix.hybrid.frames import Head, Stream
from mimatrix.hybrid.keeping import Kept
from mimatrix.hybrid.ledger import Push
from mimatrix.hybrid.shard import Shard

_IDLE_S = 3600.0
Say = Callable[[str], None]
Answer = tuple[Head, torch.Tensor | None]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a service listens."""

    address: str
    port: int


@dataclass(frozen=True)
class _Asked:
    """A message that came, for one shard."""

    shard: Shard
    head: Head
    values: torch.Tensor | None
    stream: Stream

    @property
    def is_mirrored(self) -> bool:
        """Whether it came from the shard to its mirror."""
        return bool(self.head.get("mirrored"))


class MovedError(WorldError):
    """A shard lives elsewhere now."""


class Service:
    """Holds some shards and listens: groups push and pull, other services mirror."""

    def __init__(
        self, shards: Mapping[int, Shard], token: str, address: str = "127.0.0.1", *, timeout_s: float = 30.0, say: Say
    ) -> None:
        self._shards, self._token, self._timeout_s, self._say = dict(shards), token, timeout_s, say
        self._mirrors: dict[int, Mirror] = {}
        self._taken_over: set[int] = set()
        """Mirrors that are asked by groups themselves."""
        self.left: set[int] = set()
        """Groups that have said goodbye."""
        self._listener = socket.create_server((address, 0), backlog=256)
        self.place = Place(address, self._listener.getsockname()[1])
        self._streams: set[Stream] = set()
        self._groups: dict[Stream, int] = {}
        self._copies: dict[Stream, Kept] = {}
        """Of shards, for those who are to fetch them."""
        self._answers: dict[str, Callable[[_Asked], Answer]] = {
            "push": self._pushed,
            "pull": self._pulled,
            "hold": self._held,
            "let": self._let,
            "release": self._released,
            "fetch": self._fetched,
            "join": self._joined,
            "put": self._put,
        }
        self._closing = threading.Event()
        threading.Thread(target=self._accept, name="mimatrix-shards", daemon=True).start()

    def mirror(self, shard: int, place: Place) -> None:
        """What is pushed to this shard goes there, too, from now on."""
        # A mirror that is silent is given up before those give up who wait for it.
        self._mirrors[shard] = Mirror(shard, place, self._token, self._timeout_s / 3)

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
        for mirror in self._mirrors.values():
            mirror.close()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                raw, _ = self._listener.accept()
            except OSError:
                return
            stream = Stream(raw, _IDLE_S)
            self._streams.add(stream)
            threading.Thread(target=self._serve, args=(stream,), name="mimatrix-shard", daemon=True).start()

    def _serve(self, stream: Stream) -> None:
        try:
            hello, _ = stream.receive()
            if not hmac.compare_digest(str(hello.get("token", "")), self._token):
                stream.send({"error": "this is a service of another run; it is refused"})
                return
            stream.send({"host": own_host()})
            stream.meet(str(hello.get("host", "")))
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

    def _answer(self, stream: Stream, head: Head, values: torch.Tensor | None) -> Answer:
        try:
            if head["what"] == "bye":
                self.left.add(head["group"])
                return {}, None
            if head["what"] == "mirror":
                self.mirror(head["shard"], Place(head["address"], head["port"]))
                return {}, None
            number = head["shard"]
            shard = self._shards.get(number)
            if shard is None or (head.get("mirrored") and number in self._taken_over):
                return {"moved": True}, None
            if not head.get("mirrored"):
                self._taken_over.add(number)
            return self._answers[head["what"]](_Asked(shard, head, values, stream))
        except MovedError:
            return {"moved": True}, None
        except (MiMatrixError, OSError) as error:
            return {"error": str(error)}, None
        except Exception as error:  # noqa: BLE001 (whoever asked is told, and does not ask again)
            return {"error": f"the service failed: {type(error).__name__}: {error}"}, None

    def _pushed(self, asked: _Asked) -> Answer:
        head, values = asked.head, asked.values
        assert values is not None
        push = Push(head["group"], head["number"], head["samples"], head["nominal"], head["seen"], head["life"])
        mirrored = partial(self._mirrored, asked)
        found = asked.shard.push(push, values, head["settings"], head["untouched"], mirrored=mirrored)
        told: Head = {"staleness": found.staleness, "again": found.again, "waited_s": found.waited_s}
        if asked.is_mirrored:
            return told, None
        newest, values = self._pulled(asked)
        return told | newest, values

    def _pulled(self, asked: _Asked) -> Answer:
        pulled = asked.shard.pull()
        clocks = {str(group): asked.shard.ledger.pushes.get(group, 0) for group in self._there()}
        return {"version": pulled.version, "samples": pulled.samples, "clocks": clocks}, pulled.values

    def _there(self) -> set[int]:
        return set(self._groups.copy().values()) - self.left

    def _held(self, asked: _Asked) -> Answer:
        if asked.is_mirrored:
            return {}, None
        with self._mirrored(asked):
            pass  # where the mirror has taken over, it is the one to be held
        ledger = asked.shard.hold(asked.stream, asked.head["lease_s"], asked.head["patience_s"])
        return {"ledger": ledger.to_json(), "origin": asked.shard.origin, "there": sorted(self._there())}, None

    def _let(self, asked: _Asked) -> Answer:
        head = asked.head
        upto = {int(group): int(number) for group, number in head["upto"].items()}
        self._copies[asked.stream] = asked.shard.let(asked.stream, upto, head["gone"], head["patience_s"])
        return {}, None

    def _released(self, asked: _Asked) -> Answer:
        asked.shard.release(asked.stream)
        return {}, None

    def _fetched(self, asked: _Asked) -> Answer:
        copy = self._copies.pop(asked.stream, None)
        if copy is None:
            raise WorldError("there is no copy of the shard any more; try again")
        return {}, torch.frombuffer(bytearray(copy.to_bytes()), dtype=torch.uint8)

    def _joined(self, asked: _Asked) -> Answer:
        head = asked.head
        asked.shard.join(head["group"], head["number"], head["life"], partial(self._mirrored, asked))
        return {}, None

    def _put(self, asked: _Asked) -> Answer:
        assert asked.values is not None
        kept = Kept.from_bytes(asked.values.numpy().tobytes())
        owner = None if asked.is_mirrored else asked.stream
        asked.shard.load(kept, partial(self._mirrored, asked), owner)
        return {}, None

    @contextmanager
    def _mirrored(self, asked: _Asked) -> Iterator[None]:
        """Pass it on; over when the mirror has it, too."""
        number = asked.head["shard"]
        mirror = self._mirrors.get(number)
        with mirror.lock if mirror else nullcontext():
            lost = mirror.tell(asked.head, asked.values) if mirror else None
            try:
                yield
            finally:
                if mirror:
                    self._hear(number, mirror, lost)

    def _hear(self, number: int, mirror: "Mirror", lost: Exception | None) -> None:
        """What the mirror says, if it is there."""
        try:
            if lost:
                raise lost
            mirror.hear()
        except MovedError:
            self._shards.pop(number, None)
            raise
        except (OSError, WorldError) as error:
            self._mirrors.pop(number, None)
            mirror.close()
            self._say(
                f"shard {number} has no mirror any more ({error}); what is pushed lies once until there is another"
            )


class Mirror:
    """The other place of a shard, as its service sees it."""

    def __init__(self, shard: int, place: Place, token: str, timeout_s: float) -> None:
        self._stream = greeted(place, token, timeout_s)
        self._shard = shard
        self.lock = threading.Lock()
        """Of whoever tells it something, until it is heard."""

    def tell(self, head: Head, values: torch.Tensor | None) -> Exception | None:
        """Back at once; what it answers is to be heard then, unless there is an error already."""
        try:
            self._stream.send(head | {"mirrored": True}, values)
        except OSError as error:
            return error
        return None

    def hear(self) -> None:
        """Back when it has what it was told."""
        answer, _ = self._stream.receive()
        if "moved" in answer:
            raise MovedError(f"shard {self._shard} lives with its mirror now")
        if "error" in answer:
            raise WorldError(str(answer["error"]))

    def close(self) -> None:
        """No more."""
        self._stream.close()


def greeted(place: Place, token: str, timeout_s: float, *, group: int | None = None) -> Stream:
    """A stream to a service that knows us: a group, or another service."""
    stream = Stream(socket.create_connection((place.address, place.port), timeout=timeout_s), timeout_s)
    try:
        stream.send({"token": token, "group": group, "host": own_host()})
        answer, _ = stream.receive()
        if "error" in answer:
            raise WorldError(str(answer["error"]))
        stream.meet(str(answer.get("host", "")))
    except BaseException:
        stream.close()
        raise
    return stream
