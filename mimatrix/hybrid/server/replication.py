"""The other place of each shard, and a new one where that is lost.

All services stand in one row for each shard: the groups' own from the shard's on, round to the one before it, then
those that came later, in the order in which they came. A shard is mirrored at the next one of the row that lives. So
whoever looks for a shard finds it at the first of the row that has it.
"""

import threading
from collections.abc import Callable, Sequence

import torch

from mimatrix.core.errors import WorldError
from mimatrix.hybrid.net import Address, Header, connect
from mimatrix.hybrid.server.shard import Shard
from mimatrix.hybrid.server.state import ShardState


class MovedError(WorldError):
    """A shard lives elsewhere now."""


def replica_order(shard: int, places: Sequence[Address], groups: int) -> list[Address]:
    """Where to look for a shard, one after the other; the first `groups` of all places are the groups' own."""
    own = places[:groups]
    return [*own[shard:], *own[:shard], *places[groups:]]


class Replica:
    """The other place of a shard, as its service sees it."""

    def __init__(self, shard: int, place: Address, token: str, timeout_s: float) -> None:
        self.place = place
        self._stream = connect(place, token, timeout_s)
        self._shard = shard
        self.lock = threading.Lock()
        """Of whoever tells it something, until it is heard."""

    def begin(self, kept: ShardState) -> None:
        """Back when all that the shard is lies there, too."""
        sent = torch.frombuffer(bytearray(kept.to_bytes()), dtype=torch.uint8)
        lost = self.tell({"what": "keep", "shard": self._shard}, sent)
        if lost:
            raise lost
        self.hear()

    def tell(self, head: Header, values: torch.Tensor | None) -> Exception | None:
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


class Replicas:
    """Of the shards of one service, which is at `own`."""

    def __init__(self, own: Address, token: str, timeout_s: float, say: Callable[[str], None]) -> None:
        self._own, self._token, self._timeout_s, self._say = own, token, timeout_s, say
        self._found: dict[int, Replica] = {}
        self._lost: set[Address] = set()
        self._groups = 0
        self.places: list[Address] = []
        """All services that are known."""
        self._lock = threading.Lock()

    def begin(self, shard: int, place: Address) -> None:
        """What is pushed to this shard goes there, too, from now on; it has the same already."""
        self._found[shard] = self._to(shard, place)

    def know(self, places: Sequence[Address], groups: int) -> None:
        """All services that there are in the beginning, in the order of the groups."""
        self.places, self._groups = list(places), groups

    def welcome(self, place: Address) -> list[Address]:
        """One more; all that are known then."""
        with self._lock:
            if place not in self.places:
                self.places.append(place)
            return list(self.places)

    def of(self, number: int, shard: Shard) -> Replica | None:
        """The one of a shard. Where it is lost, the shard is copied to the next in the row that lives, if any does."""
        found = self._found.get(number)
        if found or not self._open(number):
            return found
        with shard.unchanged() as kept, self._lock:
            if kept is not None and number not in self._found:
                self._found_another(number, kept)
            return self._found.get(number)

    def place_of(self, number: int) -> Address | None:
        """Where the mirror of a shard is, if it has one."""
        found = self._found.get(number)
        return found.place if found else None

    def lose(self, number: int, error: Exception) -> None:
        """The mirror of a shard does not answer."""
        mirror = self._found.pop(number, None)
        if mirror:
            mirror.close()
            self._lost.add(mirror.place)
        self._say(f"shard {number} has no mirror any more ({error}); what is pushed lies once until there is another")

    def close(self) -> None:
        """No more."""
        for mirror in self._found.values():
            mirror.close()

    def _open(self, number: int) -> list[Address]:
        """Where a mirror might be: behind this service in the row, and not known to be lost."""
        found = replica_order(number, self.places, self._groups)
        behind = found[found.index(self._own) + 1 :] if self._own in found else []
        return [place for place in behind if place not in self._lost]

    def _found_another(self, number: int, kept: ShardState) -> None:
        for place in self._open(number):
            where = str(place)
            try:
                self._found[number] = self._begun(number, place, kept)
            except (OSError, WorldError) as error:
                self._lost.add(place)
                self._say(f"shard {number} cannot be mirrored at {where} ({error})")
            else:
                self._say(f"shard {number} has a mirror again, at {where}")
                return

    def _begun(self, number: int, place: Address, kept: ShardState) -> Replica:
        mirror = self._to(number, place)
        try:
            mirror.begin(kept)
        except BaseException:
            mirror.close()
            raise
        return mirror

    def _to(self, shard: int, place: Address) -> Replica:
        # A mirror that is silent is given up before those give up who wait for it.
        return Replica(shard, place, self._token, self._timeout_s / 3)
