"""A group's way to the shards: it pushes to all at once, pulls from all at once, and goes on where one is lost."""

import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

import torch

from mimatrix.collectives.shares import Shares
from mimatrix.core.errors import WorldError
from mimatrix.hybrid.frames import Head, Stream
from mimatrix.hybrid.service import Place, greeted
from mimatrix.hybrid.shard import Settings


@dataclass(frozen=True, slots=True)
class Pulled:
    """All parameters, each shard of one version."""

    values: torch.Tensor
    versions: tuple[int, ...]
    samples: int
    """That all groups together have pushed; of the shard that has the fewest."""
    ahead: int = 0
    """Pushes by which this group is ahead of the last one that is there."""
    last: int = -1
    """That one."""


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """What became of a push, over all shards."""

    versions: tuple[int, ...]
    staleness: float
    """A mean."""


class Link:
    """Of one group. `places` has for each shard where it is, then where its mirror is."""

    def __init__(
        self,
        group: int,
        count: int,
        shares: Shares,
        places: Sequence[Sequence[Place]],
        token: str,
        *,
        timeout_s: float = 30.0,
    ) -> None:
        self._group = group
        self._sizes = list(shares.cut(count))
        self._lines = [_Line(group, number, found, token, timeout_s) for number, found in enumerate(places)]
        self._threads = ThreadPoolExecutor(max(1, len(places)), thread_name_prefix="mimatrix-link")
        self._number = 0

    def pull(self) -> Pulled:
        """The newest of every shard."""
        found = list(self._threads.map(_Line.pull, self._lines))
        versions = tuple(int(head["version"]) for head, _ in found)
        samples = min(int(head["samples"]) for head, _ in found)
        clocks = {int(group): int(pushes) for group, pushes in found[0][0]["clocks"].items()}
        last = min(clocks, key=lambda group: clocks[group], default=self._group)
        ahead = self._number - clocks.get(last, self._number)
        return Pulled(torch.cat([values for _, values in found]), versions, samples, ahead, last)

    def push(
        self,
        gradient: torch.Tensor,
        samples: int,
        nominal: int,
        settings: Sequence[Settings],
        seen: Sequence[int],
        untouched: Collection[int] = (),
    ) -> Acknowledged:
        """The mean gradient of so many samples, at parameters of the versions `seen`. Back when all shards have it."""
        self._number += 1
        heads = [
            {
                "what": "push",
                "shard": shard,
                "group": self._group,
                "number": self._number,
                "samples": samples,
                "nominal": nominal,
                "seen": version,
                "settings": list(map(dict, settings)),
                "untouched": sorted(untouched),
            }
            for shard, version in enumerate(seen)
        ]
        parts = torch.split(gradient, self._sizes)
        answers = list(self._threads.map(_Line.push, self._lines, heads, parts))
        late = [int(answer["staleness"]) for answer in answers]
        return Acknowledged(tuple(int(answer["version"]) for answer in answers), sum(late) / len(late))

    def close(self) -> None:
        """Say goodbye."""
        for line in self._lines:
            line.close(self._group)
        self._threads.shutdown(wait=True)


class _Line:
    """To one shard, wherever it is now."""

    def __init__(self, group: int, shard: int, places: Sequence[Place], token: str, timeout_s: float) -> None:
        self._group, self._shard, self._places = group, shard, list(places)
        self._token, self._timeout_s = token, timeout_s
        self._stream: Stream | None = None

    def push(self, head: Head, values: torch.Tensor) -> Head:
        return self._asked(lambda stream: _exchanged(stream, head, values))[0]

    def pull(self) -> tuple[Head, torch.Tensor]:
        answer, values = self._asked(lambda stream: _exchanged(stream, {"what": "pull", "shard": self._shard}, None))
        return answer, torch.empty(0) if values is None else values

    def close(self, group: int) -> None:
        if self._stream:
            with suppress(OSError, WorldError):
                _exchanged(self._stream, {"what": "bye", "group": group}, None)
            self._stream.close()

    def _asked(self, ask: Callable[[Stream], tuple[Head, torch.Tensor | None]]) -> tuple[Head, torch.Tensor | None]:
        """Ask until somebody answers. A push may be said twice: its number tells."""
        deadline, last = time.monotonic() + self._timeout_s, ""
        while self._places and time.monotonic() < deadline:
            try:
                self._stream = self._stream or greeted(self._places[0], self._token, self._timeout_s, group=self._group)
                return ask(self._stream)
            except OSError as error:
                last = str(error) or type(error).__name__
                if self._stream:
                    self._stream.close()
                self._stream = None
                if len(self._places) > 1:
                    self._places.pop(0)
                else:
                    time.sleep(0.1)
        where = f"{self._places[0].address} port {self._places[0].port}" if self._places else "anywhere"
        raise WorldError(f"shard {self._shard} does not answer at {where} ({last}), and neither does its mirror")


def _exchanged(stream: Stream, head: Head, values: torch.Tensor | None) -> tuple[Head, torch.Tensor | None]:
    stream.send(head, values)
    answer, found = stream.receive()
    if "moved" in answer:
        raise ConnectionError("the shard lives with its mirror now")
    if "error" in answer:
        raise WorldError(str(answer["error"]))
    return answer, found
