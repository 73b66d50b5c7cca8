"""A node that is cut off ends what it runs: the others take it for gone, and start its work again elsewhere."""

import os
import threading
import time
from collections.abc import Callable

from mimatrix.core import environment

_CUT_OFF_S = 60.0
_ASKED_S = 1.0


def fence(node: str) -> "Fence":
    """Of the node of this id, as it was told where Ray was started."""
    try:
        within_s = float(environment.CUT_OFF_S.get())
    except ValueError:
        within_s = _CUT_OFF_S
    return Fence(lambda: _is_known(node), within_s, _end)


class Fence:
    """Calls `end` when the cluster has given up this node, or has not been heard of for so long."""

    def __init__(self, is_known: Callable[[], bool], within_s: float, end: Callable[[], None]) -> None:
        self._is_known, self._within_s, self._end = is_known, within_s, end
        self._heard_at_s = time.monotonic()

    def begin(self) -> None:
        """Go on in the background."""
        # To ask may take for ever, so another one looks at the time.
        for act in (self._ask, self._look):
            threading.Thread(target=act, name="mimatrix-fence", daemon=True).start()

    def _ask(self) -> None:
        while True:
            try:
                if not self._is_known():
                    self._end()
                self._heard_at_s = time.monotonic()
            except Exception:  # noqa: BLE001, S110 (whatever Ray raises, nothing was heard)
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
    """Whoever waits for the end of this process does the rest."""
    os._exit(1)
