"""To one shard, wherever it is now: at its own place, or at one further on in its row (`hybrid.mirrors`)."""

import time
from collections.abc import Sequence
from contextlib import suppress

import torch

from mimatrix.core.errors import WorldError
from mimatrix.hybrid.net import Address, Connection, Header, connect


class ShardClient:
    """`places`: where the shard may be, in their order. `group`: who asks, where it counts as being there."""

    def __init__(self, group: int | None, shard: int, places: Sequence[Address], token: str, timeout_s: float) -> None:
        self._group, self._shard, self._places = group, shard, list(places)
        self._token, self.timeout_s = token, timeout_s
        self._stream: Connection | None = None
        self._version = 0
        """The newest that came from there; a place that has an older one is not the shard's."""
        self._is_closed = False

    def another(self) -> "ShardClient":
        """To the same shard, beside this one."""
        found = ShardClient(None, self._shard, self._places, self._token, self.timeout_s)
        found._version = self._version
        return found

    def pull(self) -> tuple[Header, torch.Tensor]:
        """The newest parameters."""
        answer, values = self.ask({"what": "pull"})
        return answer, torch.empty(0) if values is None else values

    def push(self, head: Header, values: torch.Tensor) -> tuple[Header, torch.Tensor]:
        """What became of it, and the newest parameters."""
        answer, newest = self.ask(head, values)
        return answer, torch.empty(0) if newest is None else newest

    def ask(self, head: Header, values: torch.Tensor | None = None) -> tuple[Header, torch.Tensor | None]:
        """Ask until somebody answers; each place has the time. A push may be said twice: its number tells."""
        deadline, last = time.monotonic() + self.timeout_s, ""
        while not self._is_closed and self._places and time.monotonic() < deadline:
            try:
                self._stream = self._stream or connect(self._places[0], self._token, self.timeout_s, group=self._group)
                whole = head | {"shard": self._shard, "at_least": self._version}
                answer, found = _exchanged(self._stream, whole, values)
                self._learn(answer)
                return answer, found
            except OSError as error:
                last = str(error) or type(error).__name__
                if self._stream:
                    self._stream.close()
                self._stream = None
                if len(self._places) > 1:
                    self._places.pop(0)
                    deadline = time.monotonic() + self.timeout_s
                else:
                    time.sleep(0.1)
        where = str(self._places[0]) if self._places else "anywhere"
        raise WorldError(f"shard {self._shard} does not answer at {where} ({last}), and neither does its mirror")

    def _learn(self, answer: Header) -> None:
        """How far the shard is, and where to look for it next should it be lost."""
        self._version = max(self._version, int(answer.get("version", 0)))
        if "mirror" in answer:
            mirror = Address(*answer["mirror"])
            here, *others = self._places
            self._places = [here, mirror, *(place for place in others if place != mirror)]

    def close(self) -> None:
        """No more; a group says goodbye."""
        self._is_closed = True
        if self._stream:
            if self._group is not None:
                with suppress(OSError, WorldError):
                    _exchanged(self._stream, {"what": "bye", "group": self._group}, None)
            self._stream.close()
            self._stream = None


def _exchanged(stream: Connection, head: Header, values: torch.Tensor | None) -> tuple[Header, torch.Tensor | None]:
    stream.send(head, values)
    answer, found = stream.receive()
    if "moved" in answer:
        raise ConnectionError("the shard lives with its mirror now")
    if "error" in answer:
        raise WorldError(str(answer["error"]))
    return answer, found
