"""Which endpoint a new group of torch.distributed uses, and when it is closed.

An arena, a control line and a thread are dear, so groups whose ranks have an endpoint in common are views on that one;
the last of them to be shut down closes it. A process that ends without shutting down says goodbye first: otherwise the
others, who may still be reading the last result, would take it for lost.
"""

import atexit
import json
import os
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store

from mimatrix.comm.endpoint import Endpoint
from mimatrix.comm.memory import WindowKind

Kinds = Callable[[], Mapping[str, WindowKind]]


@dataclass(slots=True)
class SharedEndpoint:
    """An endpoint of this process, the name by which its ranks know it, and how many groups are views on it."""

    name: str
    endpoint: Endpoint
    groups: int = 0
    process: int = field(default_factory=os.getpid)

    def leave(self) -> None:
        """One group less; the last one closes the endpoint."""
        self.groups -= 1
        if self.groups == 0 and self in _joined:
            _joined.remove(self)
            self.close()

    def close(self) -> None:
        """Say goodbye and give everything back, the sockets that hand out windows too."""
        self.endpoint.close()
        for kind in self.endpoint.kinds.values():
            close: Callable[[], Any] = getattr(kind, "close", lambda: None)
            close()


_joined: list[SharedEndpoint] = []
"""Of this process: c10d makes groups one by one and hands nothing from one to the next."""


def fresh_prefix(store: Store, size: int) -> Store:
    """A part of `store` that no earlier group has written to.

    Under torchrun the store outlives `destroy_process_group`, and torch counts the names of groups from 0 again.
    """
    times = (store.add("mimatrix/joined", 1) - 1) // size
    return PrefixStore(f"mimatrix/{times}", store)


def join(store: Store, rank: int, size: int, kinds: Kinds) -> tuple[SharedEndpoint, list[int]]:
    """The endpoint of a group, and its members by their ranks there: one that all of them have, or a new one."""
    mine = {each.name: each.endpoint.rank for each in _joined}
    store.set(f"endpoints/{rank}", json.dumps(mine))
    known: list[dict[str, int]] = [json.loads(store.get(f"endpoints/{other}")) for other in range(size)]
    common = sorted(set(mine).intersection(*known))
    if not common:
        found, members = _new(store, rank, size, kinds()), list(range(size))
        _joined.append(found)
    else:
        found = next(each for each in _joined if each.name == common[0])
        members = [each[found.name] for each in known]
    found.groups += 1
    return found, members


def agreed_name(store: Store, rank: int, key: str) -> str:
    """A name that only the ranks of this group share: stores of groups are apart, names must be too."""
    if rank == 0:
        store.set(key, os.urandom(8).hex())
    return store.get(key).decode()


def _new(store: Store, rank: int, size: int, kinds: Mapping[str, WindowKind]) -> SharedEndpoint:
    generation = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    return SharedEndpoint(
        agreed_name(store, rank, "endpoint"), Endpoint(store, rank, size, kinds, generation=generation)
    )


@atexit.register
def _leave_all() -> None:
    # A rank that an error ends is lost and has not left; its sockets close by themselves and say so. And the child of
    # a fork must not say goodbye for its parent.
    failed = getattr(sys, "last_value", None) is not None
    for each in _joined:
        if not failed and each.process == os.getpid():
            with suppress(Exception):
                each.close()
    _joined.clear()
