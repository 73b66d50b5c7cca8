"""How the loop of a leading rank continues, as ranks without data in a global batch are told."""

import json
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from mimatrix.comm.group import Group
from mimatrix.core.errors import PeerLost
from mimatrix.engine.loop.batch_report import BatchReport

_PAUSE_S = 1e-4
_LONGEST_PAUSE_S = 5e-3


@dataclass(frozen=True, slots=True)
class LoopState:
    """Whether the loop continues after a global batch, as one rank that runs its body tells those that do not."""

    continues: bool
    collective_call: str = ""
    """The call that needs all ranks and cannot be made now, if that is why the loop stops."""
    report: BatchReport | None = None
    """What was done in the loop's body before it was left."""

    def to_text(self) -> str:
        """Return JSON for the store."""
        report = None if self.report is None else self.report.to_json()
        return json.dumps([self.continues, self.collective_call, report])

    @classmethod
    def from_text(cls, text: str | bytes) -> "LoopState":
        """Read what `to_text` gave."""
        continues, call, report = json.loads(text)
        return cls(continues, call, None if report is None else BatchReport.from_json(report))


class LoopSignal:
    """Tells ranks without data through the store how the loop continues, one signal per global batch.

    The rank that posts waits for no other.
    """

    def __init__(self, group: Group, run_id: str, timeout_s: float = 300.0) -> None:
        self._group, self.run_id, self._timeout_s = group, run_id, timeout_s
        self._store: Any = group.endpoint.store

    def post(self, batch: int, state: LoopState) -> None:
        """Say how the loop continues after global batch number `batch`."""
        with suppress(NotImplementedError, RuntimeError):  # the one before is read by now; not all stores can delete
            self._store.delete_key(self._key(batch - 2))
        self._group.endpoint.control.begun[self.run_id] = batch
        self._store.set(self._key(batch), state.to_text())

    def wait(self, batch: int, leader: int) -> LoopState:
        """Wait for what the leading rank posts."""
        key, started, pause = self._key(batch), time.monotonic(), _PAUSE_S
        endpoint, members = self._group.endpoint, self._group.members
        doing = "the loop over its loader"
        endpoint.control.await_arrival(self.run_id, batch, (members[leader],), None)
        while not self._store.check([key]):
            endpoint.control.note_waiting(self.run_id)
            endpoint.control.check(members[leader], members, doing)
            if time.monotonic() - started > self._timeout_s:
                name = endpoint.control.describe(members[leader])
                raise PeerLost(f"{name} did not continue {doing} for {self._timeout_s:.0f} s", members[leader])
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)
        endpoint.control.end_arrival(self.run_id)
        # The leader also leaves its loop by an error that all ranks know of.
        endpoint.control.check(-1, members, doing)
        return LoopState.from_text(self._store.get(key))

    def _key(self, batch: int) -> str:
        return f"mimatrix/run/{self.run_id}/{batch}"
