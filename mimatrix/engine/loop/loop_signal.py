"""Word for ranks without data: whether the others go on with the loop over the loader, or have left it.

A rank without data in a global batch does not run the loop's body, so it cannot see a `break` there. One of those that
do run it leaves word after each such batch, without waiting for anybody.
"""

import json
import time
from contextlib import suppress
from typing import Any

from mimatrix.comm.group import Group
from mimatrix.core.errors import PeerLost

_PAUSE_S = 1e-4
_LONGEST_PAUSE_S = 5e-3


class LoopSignal:
    """Left and found in the store of a job, numbered by the batches to which it belongs."""

    def __init__(self, group: Group, run: str, timeout_s: float = 300.0) -> None:
        self._group, self._run, self._timeout_s = group, run, timeout_s
        self._store: Any = group.endpoint.store

    def leave(self, number: int, message: dict[str, Any]) -> None:
        """Say what comes after a batch."""
        with suppress(NotImplementedError, RuntimeError):  # the one before is read by now; not all stores can forget
            self._store.delete_key(self._key(number - 2))
        self._store.set(self._key(number), json.dumps(message))

    def find(self, number: int, leader: int) -> dict[str, Any]:
        """What the leader said; waits for it."""
        key, started, pause = self._key(number), time.monotonic(), _PAUSE_S
        endpoint, members = self._group.endpoint, self._group.members
        doing = "the loop over its loader"
        while not self._store.check([key]):
            endpoint.control.check(members[leader], members, doing)
            if time.monotonic() - started > self._timeout_s:
                name = endpoint.control.describe(members[leader])
                raise PeerLost(f"{name} did not go on with {doing} for {self._timeout_s:.0f} s", members[leader])
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        found: dict[str, Any] = json.loads(self._store.get(key))
        return found

    def _key(self, number: int) -> str:
        return f"mimatrix/run/{self._run}/{number}"
