"""How groups find each other: through the store of the job, once. After that it may be lost."""

import hashlib
import json
import secrets
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch._C._distributed_c10d import PrefixStore, Store

from mimatrix.collectives.shares import Shares
from mimatrix.core.errors import UserError
from mimatrix.hybrid.host import Order, started
from mimatrix.hybrid.layout import Layout
from mimatrix.hybrid.link import Link
from mimatrix.hybrid.policies import Policy
from mimatrix.hybrid.service import Place, greeted


@dataclass(frozen=True)
class Meeting:
    """Of the first ranks of all groups."""

    store: Store
    group: int
    groups: int
    policy: Policy
    address: str
    """By which this host is reached."""
    timeout_s: float

    def __call__(self, layout: Layout, row: torch.Tensor) -> Link:
        """Serve what falls to this group, and find the others."""
        store = PrefixStore("hybrid", self.store)
        store.set_timeout(timedelta(seconds=self.timeout_s))
        self._check_same(store, layout, row)
        if self.group == 0:
            store.set("token", secrets.token_hex(16))
        token = store.get("token").decode()
        shares = Shares.equal(self.groups)
        mine = started(self._order(layout, row, shares, token))
        store.set(f"place/{self.group}", json.dumps([mine.address, mine.port]))
        places = [Place(*json.loads(store.get(f"place/{other}"))) for other in range(self.groups)]
        if self.groups > 1:
            self._mirror(mine, places[(self.group + 1) % self.groups], token)
        store.set(f"ready/{self.group}", "")
        store.wait([f"ready/{other}" for other in range(self.groups)])
        each = [[places[shard], places[(shard + 1) % self.groups]][: self.groups] for shard in range(self.groups)]
        return Link(self.group, layout.count, shares, each, token, timeout_s=self.timeout_s)

    def _order(self, layout: Layout, row: torch.Tensor, shares: Shares, token: str) -> Order:
        """The shard of this group, and that of the one before as its mirror."""
        parts = torch.split(row, list(shares.cut(layout.count)))
        steppings = layout.steppings(shares, self.policy.outer)
        mine = {self.group, (self.group - 1) % self.groups}
        shards = {number: (parts[number].clone(), steppings[number]) for number in mine}
        return Order(self.address, token, self.groups, self.policy.rules, shards, self.timeout_s)

    def _mirror(self, mine: Place, other: Place, token: str) -> None:
        stream = greeted(mine, token, self.timeout_s)
        stream.send({"what": "mirror", "shard": self.group, "address": other.address, "port": other.port})
        answer, _ = stream.receive()
        stream.close()
        assert "error" not in answer, answer

    def _check_same(self, store: Store, layout: Layout, row: torch.Tensor) -> None:
        digest = hashlib.sha256(row.numpy().tobytes()).hexdigest()
        mine = f"{type(layout.optimizer).__name__} on {layout.count} elements, {digest}"
        store.set(f"digest/{self.group}", mine)
        first = store.get("digest/0").decode()
        if first != mine:
            raise UserError(
                f"group {self.group} begins with other parameters or another optimizer than group 0; make the model "
                "after mimatrix.init, which seeds all ranks alike, or load the same weights in all groups"
            )
