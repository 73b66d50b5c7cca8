"""Serves shards to groups: one service on each group's host, never the job server.

A shard lies twice, on its own host and on another one, its mirror. A push is worked in on both before it is
acknowledged and before anybody can pull it; so whoever is lost, nothing is that somebody was told of. A group that
cannot reach a shard's own host turns to the mirror, which from then on is the shard: the other one, if it still lives,
is told so with its next push, and sends everybody there.
"""

import hmac
import socket
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch

from mimatrix.comm.endpoint import own_host
from mimatrix.core.errors import MiMatrixError, WorldError
from mimatrix.hybrid.frames import Head, Stream
from mimatrix.hybrid.ledger import Push
from mimatrix.hybrid.shard import Shard

_IDLE_S = 3600.0
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a service listens."""

    address: str
    port: int


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
        self._closing = threading.Event()
        threading.Thread(target=self._accept, name="mimatrix-shards", daemon=True).start()

    def mirror(self, shard: int, place: Place) -> None:
        """What is pushed to this shard goes there, too, from now on."""
        self._mirrors[shard] = Mirror(shard, place, self._token, self._timeout_s)

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
            while not self._closing.is_set():
                stream.send(*self._answer(*stream.receive()))
        except (OSError, ValueError, MiMatrixError):
            pass  # whoever it was is gone, or makes no sense: it may come again
        finally:
            self._streams.discard(stream)
            self._groups.pop(stream, None)
            stream.close()

    def _answer(self, head: Head, values: torch.Tensor | None) -> tuple[Head, torch.Tensor | None]:
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
            if head["what"] == "push":
                assert values is not None
                return self._pushed(shard, head, values), None
            pulled = shard.pull()
            there = set(self._groups.copy().values()) - self.left
            clocks = {str(group): shard.ledger.pushes.get(group, 0) for group in there}
            return {"version": pulled.version, "samples": pulled.samples, "clocks": clocks}, pulled.values
        except MovedError:
            return {"moved": True}, None
        except (MiMatrixError, OSError) as error:
            return {"error": str(error)}, None

    def _pushed(self, shard: Shard, head: Head, values: torch.Tensor) -> Head:
        push = Push(head["group"], head["number"], head["samples"], head["nominal"], head["seen"])
        found = shard.push(
            push, values, head["settings"], head["untouched"], mirrored=lambda: self._mirrored(head, values)
        )
        return {"version": found.version, "staleness": found.staleness, "again": found.again}

    def _mirrored(self, head: Head, values: torch.Tensor) -> None:
        number = head["shard"]
        mirror = self._mirrors.get(number)
        if mirror is None:
            return
        try:
            mirror.push(head, values)
        except MovedError:
            del self._shards[number]
            raise
        except (OSError, WorldError) as error:
            del self._mirrors[number]
            mirror.close()
            self._say(
                f"shard {number} has no mirror any more ({error}); what is pushed lies once until there is another"
            )


class Mirror:
    """The other place of a shard, as its service sees it."""

    def __init__(self, shard: int, place: Place, token: str, timeout_s: float) -> None:
        self._stream = greeted(place, token, timeout_s)
        self._shard = shard

    def push(self, head: Head, values: torch.Tensor) -> None:
        """Back when it has it."""
        self._stream.send(head | {"mirrored": True}, values)
        answer, _ = self._stream.receive()
        if "moved" in answer:
            raise MovedError(f"shard {head['shard']} lives with its mirror now")
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
