"""A consistent cut through all shards: one client holds them until all have applied the same pushes.

A push goes to all shards at once and arrives at one earlier than at another. So the client first holds all shards, then
lets each apply what any other has applied already. A group waits for all shards before it pushes again, so it has at
most one push in flight. The client that is first at shard 0 holds them all; other clients wait there.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TypeVar

from mimatrix.core.errors import WorldError
from mimatrix.hybrid.client.shard_client import ShardClient
from mimatrix.hybrid.net import Header
from mimatrix.hybrid.server.hold import latest_pushes, resolve_join
from mimatrix.hybrid.server.push_log import PushLog
from mimatrix.hybrid.server.state import ShardState

T = TypeVar("T")


class ConsistentCut:
    """All shards, held by this client through connections of its own.

    Leaving the `with` block admits pushes again. If the client dies, its holds end with its connections or expire.
    """

    def __init__(
        self, clients: Sequence[ShardClient], threads: ThreadPoolExecutor, lease_s: float, replies: Sequence[Header]
    ) -> None:
        self._clients, self._threads, self._lease_s = clients, threads, lease_s
        self._has_copies = False
        self._logs = [PushLog.from_json(reply["log"]) for reply in replies]
        self._origins = [str(reply["origin"]) for reply in replies]
        self._connected = {int(group) for reply in replies for group in reply["connected"]}
        """The groups that are connected to any shard."""

    @classmethod
    def hold(cls, clients: Sequence[ShardClient], lease_s: float) -> "ConsistentCut":
        """Hold all shards, one client each; the cut owns the clients and closes them."""
        timeout_s = min(client.timeout_s for client in clients)
        lease_s = min(lease_s, timeout_s / 3)
        threads = ThreadPoolExecutor(len(clients), thread_name_prefix="mimatrix-hold")
        request: Header = {"type": "hold", "lease_s": lease_s, "timeout_s": timeout_s / 2}
        try:
            first, _ = clients[0].request(request)
            replies = [first, *_request_all(threads, clients[1:], request)]
        except BaseException:
            _close(clients, threads)
            raise
        return cls(clients, threads, lease_s, replies)

    def __enter__(self) -> "ConsistentCut":
        return self

    def __exit__(self, *_: object) -> None:
        if not self._has_copies:
            self.close()
            return
        with suppress(WorldError):  # a hold that is not released expires
            _request_all(self._threads, self._clients, {"type": "release"})

    def copy(self) -> None:
        """Let every server copy its shard, all with the same pushes applied."""
        admitted = latest_pushes(self._logs)
        request: Header = {
            "type": "copy",
            "admitted": {str(group): number for group, number in admitted.items()},
            "disconnected": sorted(admitted.keys() - self._connected),
            "timeout_s": self._lease_s / 2,
        }
        _request_all(self._threads, self._clients, request)
        self._has_copies = True

    def fetch(self) -> list[ShardState]:
        """Return the copies, once; pushes may have been applied since."""
        try:
            return _run_all(self._threads, [partial(_fetch, client) for client in self._clients])
        finally:
            self.close()

    def join(self, group: int) -> tuple[int, int]:
        """Let a group join; return the number of its last push, and its incarnation."""
        number, incarnation = resolve_join(group, self._logs, self._connected)
        request: Header = {"type": "join", "group": group, "number": number, "incarnation": incarnation}
        _request_all(self._threads, self._clients, request)
        return number, incarnation

    def load(self, states: Sequence[ShardState]) -> bool:
        """Load a checkpoint into shards that have applied no push yet.

        Returns:
            Whether all shards are now at the checkpoint, and no further.

        Raises:
            WorldError: Some shards were trained before the checkpoint was loaded.
        """
        is_fresh = [not origin and not log.version for origin, log in zip(self._origins, self._logs, strict=True)]
        is_loaded = [
            origin == state.origin and log.version == state.log.version
            for origin, log, state in zip(self._origins, self._logs, states, strict=True)
        ]
        if not any(is_fresh):
            return all(is_loaded)
        if not all(fresh or loaded for fresh, loaded in zip(is_fresh, is_loaded, strict=True)):
            raise WorldError(
                "a group is already training while another loads a checkpoint; let all groups call run.load before "
                "they train"
            )
        for client, log, state, fresh in zip(self._clients, self._logs, states, is_fresh, strict=True):
            if fresh:
                # The groups that have joined stay; version and samples are those of the checkpoint.
                merged = replace(log, version=state.log.version, samples=state.log.samples)
                client.request({"type": "load"}, replace(state, log=merged).to_tensor())
        return True

    def close(self) -> None:
        """Close the connections, which ends the holds."""
        _close(self._clients, self._threads)


def _close(clients: Sequence[ShardClient], threads: ThreadPoolExecutor) -> None:
    for client in clients:
        client.close()
    threads.shutdown()


def _request_all(threads: ThreadPoolExecutor, clients: Sequence[ShardClient], request: Header) -> list[Header]:
    return [reply for reply, _ in _run_all(threads, [partial(client.request, request) for client in clients])]


def _run_all(threads: ThreadPoolExecutor, calls: Sequence[Callable[[], T]]) -> list[T]:
    """Run all calls at once. If one fails, still wait for the others: a client closed in a request would retry."""
    futures = [threads.submit(call) for call in calls]
    wait(futures)
    return [future.result() for future in futures]


def _fetch(client: ShardClient) -> ShardState:
    _, copy = client.request({"type": "fetch"})
    assert copy is not None
    return ShardState.from_tensor(copy)
