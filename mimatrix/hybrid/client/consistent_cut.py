"""All shards held for a moment by one group, so that it sees them with the same pushes in them.

A push goes to all shards at once, and comes in at one sooner than at another. So they are held first; then each is let
have what any of the others has already. A group that waits for all shards before it pushes again owes one push at most.
Who is first at the first shard holds them all; the others wait there.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace

import torch

from mimatrix.core.errors import WorldError
from mimatrix.hybrid.client.shard_client import ShardClient
from mimatrix.hybrid.net import Header
from mimatrix.hybrid.server.hold import latest_pushes, resolve_join
from mimatrix.hybrid.server.push_log import PushLog
from mimatrix.hybrid.server.state import ShardState


class ConsistentCut:
    """On lines of its own, one for each shard. Whatever happens to whoever holds them, pushes go on after a while."""

    def __init__(self, lines: Sequence[ShardClient], lease_s: float) -> None:
        self._lines = lines
        timeout_s = min(line.timeout_s for line in lines)
        self._lease_s, self._patience_s = min(lease_s, timeout_s / 3), timeout_s / 2
        self._threads = ThreadPoolExecutor(len(lines), thread_name_prefix="mimatrix-hold")
        self._has_copies = False
        self.ledgers: list[PushLog] = []
        self.origins: list[str] = []
        self.there: set[int] = set()
        """The groups that are connected to any of them."""

    def __enter__(self) -> "ConsistentCut":
        asks: Header = {"what": "hold", "lease_s": self._lease_s, "patience_s": self._patience_s}
        try:
            first, _ = self._lines[0].ask(asks)
            found = [first, *self._all(asks, self._lines[1:])]
        except BaseException:
            self.close()
            raise
        self.ledgers = [PushLog.from_json(head["ledger"]) for head in found]
        self.origins = [str(head["origin"]) for head in found]
        self.there = {int(group) for head in found for group in head["there"]}
        return self

    def __exit__(self, *_: object) -> None:
        if not self._has_copies:
            self.close()
            return
        with suppress(WorldError):  # where one does not hear it, the hold ends by itself
            self._all({"what": "release"})

    def copy(self) -> None:
        """Let each shard copy itself, with the same pushes in all."""
        upto = latest_pushes(self.ledgers)
        asks: Header = {
            "what": "let",
            "upto": {str(group): number for group, number in upto.items()},
            "gone": sorted(upto.keys() - self.there),
            "patience_s": self._lease_s / 2,
        }
        self._all(asks)
        self._has_copies = True

    def fetched(self) -> list[ShardState]:
        """The copies, once; pushes may have gone on since."""
        try:
            futures = [self._threads.submit(_fetched, line) for line in self._lines]
            wait(futures)
            return [future.result() for future in futures]
        finally:
            self.close()

    def join(self, group: int) -> tuple[int, int]:
        """Let a group come: the number of its last push, and which of its lives this is."""
        number, life = resolve_join(group, self.ledgers, self.there)
        asks: Header = {"what": "join", "group": group, "number": number, "life": life}
        self._all(asks)
        return number, life

    def put(self, kept: Sequence[ShardState]) -> bool:
        """Let shards that have not begun yet begin with this; whether all are there now, and no further."""
        fresh = [not origin and not ledger.version for origin, ledger in zip(self.origins, self.ledgers, strict=True)]
        same = [
            origin == each.origin and ledger.version == each.ledger.version
            for origin, ledger, each in zip(self.origins, self.ledgers, kept, strict=True)
        ]
        if not any(fresh):
            return all(same)
        if not all(new or known for new, known in zip(fresh, same, strict=True)):
            raise WorldError(
                "a group trains already while another loads; let all groups call run.load before they train"
            )
        for line, ledger, each, new in zip(self._lines, self.ledgers, kept, fresh, strict=True):
            if new:
                line.ask({"what": "put"}, _sent(replace(each, ledger=_begun(ledger, each.ledger))))
        return True

    def close(self) -> None:
        """No more."""
        for line in self._lines:
            line.close()
        self._threads.shutdown()

    def _all(self, asks: Header, lines: Sequence[ShardClient] | None = None) -> list[Header]:
        """What all say. All are waited for, also where one fails: a line closed while it asks would ask elsewhere."""
        futures = [self._threads.submit(line.ask, asks) for line in (self._lines if lines is None else lines)]
        wait(futures)
        return [future.result()[0] for future in futures]


def _fetched(line: ShardClient) -> ShardState:
    _, copy = line.ask({"what": "fetch"})
    assert copy is not None
    return ShardState.from_bytes(copy.numpy().tobytes())


def _sent(kept: ShardState) -> torch.Tensor:
    return torch.frombuffer(bytearray(kept.to_bytes()), dtype=torch.uint8)


def _begun(here: PushLog, saved: PushLog) -> PushLog:
    """Who is here stays; what was counted is as it was saved."""
    return replace(here, version=saved.version, samples=saved.samples)
