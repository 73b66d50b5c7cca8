"""How groups find each other: through the store of the job, once. After that it may be lost."""

import hashlib
import json
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from mimatrix.collectives.shares import Shares
from mimatrix.core.errors import UserError, WorldError
from mimatrix.hybrid.client.client import ShardsClient
from mimatrix.hybrid.client.flat_layout import FlatLayout
from mimatrix.hybrid.net import Address, Connection, Header, connect
from mimatrix.hybrid.policy import Policy
from mimatrix.hybrid.server import replication as mirrors
from mimatrix.hybrid.server.process import ServerSpec, spawn

_LOOKS_S = 0.02


@dataclass(frozen=True, slots=True)
class RendezvousInfo:
    """What whoever comes later must know: the secret of the run, where its services are, and what they serve."""

    token: str
    places: tuple[Address, ...]
    what: str

    def to_json(self) -> str:
        """One line."""
        return json.dumps([self.token, [[place.host, place.port] for place in self.places], self.what])

    @classmethod
    def from_json(cls, text: str | bytes) -> "RendezvousInfo":
        """The same again."""
        token, places, what = json.loads(text)
        return cls(token, tuple(Address(*place) for place in places), what)

    @classmethod
    def read(cls, file: Path) -> "RendezvousInfo":
        """As it was left there."""
        try:
            return cls.from_json(file.read_bytes())
        except OSError as error:
            raise UserError(f"a lost group cannot return without {file} ({error.strerror}); start all again") from None


@dataclass(frozen=True)
class Rendezvous:
    """Of the first ranks of all groups."""

    store: Store
    group: int
    groups: int
    policy: Policy
    address: str
    """By which this host is reached."""
    timeout_s: float
    word: Path | None = None
    """A file in which word is left for groups that come again; without, it is in the store, as long as that lives."""
    returns: bool = False
    """Whether this group comes again, where there is such a file."""

    def __call__(self, layout: FlatLayout, row: torch.Tensor) -> ShardsClient:
        """Serve what falls to this group, and find the others; or come back to them."""
        store = PrefixStore("hybrid", self.store)
        store.set_timeout(timedelta(seconds=self.timeout_s))
        met, beside = self._word_left(store), None
        if met is None:
            met = self._met(store, layout, row)
            self._leave_word(store, met)
            places = met.places
        elif met.what != _described(layout):
            raise UserError(
                f"group {self.group} comes back with {_described(layout)} to {met.what}; use the same model"
            )
        else:
            places, beside = self._back(met, layout, row)
            self._leave_word(store, replace(met, places=places))
        each = [mirrors.replica_order(shard, places, self.groups) for shard in range(self.groups)]
        shares = Shares.equal(self.groups)
        return ShardsClient(self.group, layout.count, shares, each, met.token, timeout_s=self.timeout_s, beside=beside)

    def _back(
        self, met: RendezvousInfo, layout: FlatLayout, row: torch.Tensor
    ) -> tuple[tuple[Address, ...], Connection | None]:
        """Come back: where services are now. Where that of this group is lost, a new one is there for shards to lie."""
        if self._answers(met.places[self.group], met.token):
            mine, beside = met.places[self.group], None
        else:
            mine = spawn(replace(self._order(layout, row, Shares.equal(self.groups), met.token), shards={}))
            beside = connect(mine, met.token, self.timeout_s, group=self.group)
        places, answers = list(met.places), 0
        for place in met.places:
            with suppress(OSError):
                found = self._told(place, met.token, {"what": "welcome", "place": mine.to_json()})["places"]
                places += [known for known in (Address(*each) for each in found) if known not in places]
                answers += place != mine
        if not answers and self.groups > 1:
            raise UserError(f"group {self.group} was lost, and no other is there any more; start all again")
        if beside and mine not in places:
            places.append(mine)
        if beside:
            _told(beside, {"what": "know", "places": [place.to_json() for place in places], "groups": self.groups})
        return tuple(places), beside

    def _answers(self, place: Address, token: str) -> bool:
        try:
            connect(place, token, self.timeout_s).close()
        except OSError:
            return False
        return True

    def _told(self, place: Address, token: str, head: Header) -> Header:
        stream = connect(place, token, self.timeout_s)
        try:
            return _told(stream, head)
        finally:
            stream.close()

    def _met(self, store: Store, layout: FlatLayout, row: torch.Tensor) -> RendezvousInfo:
        self._check_same(store, layout, row)
        if self.group == 0:
            # One that was started again in the middle of this finds its own: the first that came is the one.
            store.compare_set("token", "", secrets.token_hex(16))
        token = store.get("token").decode()
        mine = self._served(store, layout, row, token)
        self._await(store, "place")
        places = [Address(*json.loads(store.get(f"place/{other}"))) for other in range(self.groups)]
        if self.groups > 1:
            self._mirror(mine, places, token)
        store.set(f"ready/{self.group}", "")
        self._await(store, "ready")
        return RendezvousInfo(token, tuple(places), _described(layout))

    def _await(self, store: Store, what: str) -> None:
        """Until all groups have said so; a sentence with those that did not."""
        deadline = time.monotonic() + self.timeout_s
        missing = list(range(self.groups))
        while missing and time.monotonic() < deadline:
            try:
                missing = [other for other in missing if not store.check([f"{what}/{other}"])]
            except RuntimeError as error:  # torch.distributed's, of a store that is gone
                raise WorldError(
                    f"the store of the job at rank 0 is gone before all groups have met ({error})"
                ) from None
            if missing:
                time.sleep(_LOOKS_S)
        if missing:
            who = ", ".join(f"group {other}" for other in missing)
            raise WorldError(f"{who} did not come to the others within {self.timeout_s:g} s; see what it said")

    def _served(self, store: Store, layout: FlatLayout, row: torch.Tensor, token: str) -> Address:
        """A process that serves for this group: a new one, or that of an earlier life, which others know already."""
        name = f"place/{self.group}"
        if not store.check([name]):
            mine = spawn(self._order(layout, row, Shares.equal(self.groups), token))
            store.set(name, json.dumps([mine.host, mine.port]))
        return Address(*json.loads(store.get(name)))

    def _word_left(self, store: Store) -> RendezvousInfo | None:
        if self.word:
            return RendezvousInfo.read(self.word) if self.returns else None
        return RendezvousInfo.from_json(store.get("met")) if store.check(["met"]) else None

    def _leave_word(self, store: Store, met: RendezvousInfo) -> None:
        if not self.word:
            store.set("met", met.to_json())
            return
        write_file(self.word, met.to_json())

    def _order(self, layout: FlatLayout, row: torch.Tensor, shares: Shares, token: str) -> ServerSpec:
        """The shard of this group, and that of the one before as its mirror."""
        parts = torch.split(row, list(shares.cut(layout.count)))
        steppings = tuple(layout.steppings(shares, self.policy.outer))
        mine = {self.group, (self.group - 1) % self.groups}
        shards = {number: parts[number].clone() for number in mine}
        return ServerSpec(self.address, token, self.groups, self.policy.scaling, shards, steppings, self.timeout_s)

    def _mirror(self, mine: Address, places: Sequence[Address], token: str) -> None:
        at = (self.group + 1) % self.groups
        known = [place.to_json() for place in places]
        self._told(mine, token, {"what": "mirror", "shard": self.group, "at": at, "places": known})

    def _check_same(self, store: Store, layout: FlatLayout, row: torch.Tensor) -> None:
        digest = hashlib.sha256(row.numpy().tobytes()).hexdigest()
        mine = f"{_described(layout)}, {digest}"
        store.set(f"digest/{self.group}", mine)
        first = store.get("digest/0").decode()
        if first != mine:
            raise UserError(
                f"group {self.group} begins with other parameters or another optimizer than group 0; make the model "
                "after mimatrix.init, which seeds all ranks alike, or load the same weights in all groups"
            )


def write_file(file: Path, text: str) -> None:
    """For those that come again, whole or not at all. Where it cannot be written, on a node without it, none comes."""
    new = file.with_name(f"{file.name}-{secrets.token_hex(4)}")
    with suppress(OSError):
        new.touch(0o600)
        new.write_text(text)
        new.rename(file)


def _told(stream: Connection, head: Header) -> Header:
    stream.send(head)
    answer, _ = stream.receive()
    if "error" in answer:
        raise WorldError(f"the service of a group does not do it ({head['what']}): {answer['error']}")
    return answer


def _described(layout: FlatLayout) -> str:
    return f"{type(layout.optimizer).__name__} on {layout.count} elements"
