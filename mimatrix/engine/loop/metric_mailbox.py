"""How metrics reach the other ranks if ranks do not meet again: through the store, without a collective."""

import json
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

logger = logging.getLogger(__name__)

SumsByStep = Mapping[str, Mapping[str, Sequence[float]]]
"""By step and metric: the weighted sum, and the sum of weights."""
_WAIT_S = 2.0
_PAUSE_S = 1e-3


class MetricMailbox:
    """What each rank had logged when it left the loop's body; posting waits for no rank."""

    def __init__(self, store: Any, run_id: str, rank: int, world_size: int, wait_s: float = _WAIT_S) -> None:
        self._store, self._run_id, self._rank, self._world_size = store, run_id, rank, world_size
        self._wait_s = wait_s
        self._posted: int | None = None

    def post(self, step: int, sums: SumsByStep) -> None:
        """Leave this rank's sums for the others, after `step` steps."""
        with suppress(NotImplementedError, RuntimeError):  # not all stores can delete, or are still there
            if self._posted is not None:
                self._store.delete_key(self._key(self._posted, self._rank))
        with suppress(RuntimeError):
            self._store.set(self._key(step, self._rank), json.dumps(sums))
            self._posted = step

    def collect(self, step: int, own: SumsByStep) -> list[SumsByStep]:
        """Return the sums of all ranks that have posted after `step` steps, or do so within a moment."""
        until_s, found = time.monotonic() + self._wait_s, [own]
        for rank in range(self._world_size):
            sums = own if rank == self._rank else self._wait(self._key(step, rank), until_s)
            if sums is None:
                logger.warning("rank %d did not tell what it logged in step %d; its mean is without it", rank, step)
            elif rank != self._rank:
                found.append(sums)
        return found

    def _wait(self, key: str, until_s: float) -> SumsByStep | None:
        try:
            while not self._store.check([key]):
                if time.monotonic() > until_s:
                    return None
                time.sleep(_PAUSE_S)
            sums: SumsByStep = json.loads(self._store.get(key))
        except RuntimeError:  # the rank that has the store is gone
            return None
        return sums

    def _key(self, step: int, rank: int) -> str:
        return f"mimatrix/run/{self._run_id}/metrics/{step}/{rank}"
