"""Fencing: a node that is cut off ends what it runs, as the others start its work again elsewhere."""

import os
import threading
import time
from collections.abc import Callable

from mimatrix.core import environment

_CUT_OFF_S = 60.0
_ASKED_S = 1.0


def fence(node: str) -> "Fence":
    """Return the fence of the node of this id, with the time limit that was set where Ray was started."""
    try:
        within_s = float(environment.CUT_OFF_S.get())
    except ValueError:
        within_s = _CUT_OFF_S
    return Fence(lambda: _is_known(node), within_s, _end)


class Fence:
    """Calls `end` when the cluster has lost this node, or has not answered for `within_s` seconds."""

    def __init__(self, is_known: Callable[[], bool], within_s: float, end: Callable[[], None]) -> None:
        self._is_known, self._within_s, self._end = is_known, within_s, end
        self._heard_at_s = time.monotonic()

    def begin(self) -> None:
        """Watch in the background."""
        # A question may block for ever, so another thread watches the clock.
        for act in (self._ask, self._look):
            threading.Thread(target=act, name="mimatrix-fence", daemon=True).start()

    def _ask(self) -> None:
        while True:
            try:
                if not self._is_known():
                    self._end()
                self._heard_at_s = time.monotonic()
            except Exception:  # noqa: BLE001, S110 (whatever Ray raises, there was no answer)
                pass
            time.sleep(_ASKED_S)

    def _look(self) -> None:
        while time.monotonic() - self._heard_at_s < self._within_s:
            time.sleep(_ASKED_S)
        self._end()


def _is_known(node: str) -> bool:
    import ray

    told = ray.nodes()  # type: ignore[no-untyped-call]
    return any(each["NodeID"] == node and each["Alive"] for each in told)


def _end() -> None:
    """End this process; the watchdog that waits for that does the rest."""
    os._exit(1)
