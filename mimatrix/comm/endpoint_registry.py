"""Which endpoint a new group of torch.distributed uses, and when it is closed.

An arena, a control connection and a thread are expensive, so groups whose ranks have an endpoint in common share it;
the last of them to be shut down closes it. A process that ends without shutting down says goodbye first: otherwise the
other ranks, which may still be reading the last result, would report it as lost.
"""

import atexit
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store

from mimatrix.comm.endpoint import Endpoint
from mimatrix.comm.exit_status import ExitStatus
from mimatrix.comm.memory.base import WindowKind
from mimatrix.comm.memory.peer_access import describe_gpu
from mimatrix.core.errors import MiMatrixError

WindowKinds = Callable[[], Mapping[str, WindowKind]]


@dataclass(slots=True)
class SharedEndpoint:
    """An endpoint of this process, the name by which its ranks know it, and how many groups use it."""

    name: str
    endpoint: Endpoint
    groups: int = 0
    process: int = field(default_factory=os.getpid)

    def release(self) -> None:
        """Let one group go; the last one closes the endpoint."""
        self.groups -= 1
        if self.groups == 0 and self in _endpoints:
            _endpoints.remove(self)
            self.close()

    def close(self) -> None:
        """Leave the job and close everything, the sockets that serve windows too."""
        self.endpoint.close()
        for kind in self.endpoint.window_kinds.values():
            close: Callable[[], Any] = getattr(kind, "close", lambda: None)
            close()


_endpoints: list[SharedEndpoint] = []
"""Those of this process: c10d creates groups one by one and passes nothing from one to the next."""
_exit_status = ExitStatus()


def fresh_prefix(store: Store, world_size: int) -> Store:
    """Return a part of `store` that no earlier group has written to.

    Under torchrun the store outlives `destroy_process_group`, and torch counts the names of groups from 0 again.
    """
    times = (store.add("mimatrix/joined", 1) - 1) // world_size
    return PrefixStore(f"mimatrix/{times}", store)


def acquire(store: Store, rank: int, world_size: int, kinds: WindowKinds) -> tuple[SharedEndpoint, list[int]]:
    """Return an endpoint that all ranks of a group have, or a new one, and the group's members by their ranks there."""
    own = {shared.name: shared.endpoint.rank for shared in _endpoints}
    store.set(f"endpoints/{rank}", json.dumps(own))
    by_rank: list[dict[str, int]] = [json.loads(store.get(f"endpoints/{peer}")) for peer in range(world_size)]
    common = sorted(set(own).intersection(*by_rank))
    if not common:
        endpoint, members = _join(store, rank, world_size, kinds()), list(range(world_size))
        _endpoints.append(endpoint)
    else:
        endpoint = next(shared for shared in _endpoints if shared.name == common[0])
        members = [ranks[endpoint.name] for ranks in by_rank]
    endpoint.groups += 1
    return endpoint, members


def agreed_name(store: Store, rank: int, key: str) -> str:
    """Return a random name that all ranks of this group share and no other group has."""
    if rank == 0:
        store.set(key, os.urandom(8).hex())
    return store.get(key).decode()


def find_failure(wait_s: float) -> MiMatrixError | None:
    """Return the error of a job of this process that has lost a rank; wait a little, as the news may be on its way."""
    until = time.monotonic() + wait_s
    while True:
        for shared in _endpoints:
            endpoint = shared.endpoint
            if failure := endpoint.control.failure(-1, range(endpoint.world_size), "a collective"):
                return failure
        if time.monotonic() >= until or not _endpoints:
            return None
        time.sleep(0.02)


def has_joined() -> bool:
    """Return whether this process has a job with other ranks."""
    return any(shared.endpoint.world_size > 1 for shared in _endpoints)


def note_exit_code(code: int) -> None:
    """Say with which code this process is about to end, for exit handlers that have to end it themselves."""
    _exit_status.note(code)


def _join(store: Store, rank: int, world_size: int, kinds: Mapping[str, WindowKind]) -> SharedEndpoint:
    _exit_status.watch()
    generation = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    name = agreed_name(store, rank, "endpoint")
    endpoint = Endpoint.join(store, rank, world_size, kinds, gpu=describe_gpu(), generation=generation)
    return SharedEndpoint(name, endpoint)


@atexit.register
def _leave_all() -> None:
    # A rank that ends with an error is lost and has not left: its sockets close by themselves and show it. And the
    # child of a fork must not leave for its parent.
    has_failed = _exit_status.has_failed
    for shared in _endpoints:
        if shared.process != os.getpid():
            continue
        with suppress(Exception):
            shared.endpoint.watchdog.abort_all() if has_failed else shared.close()
        # Gloo would abort the process when it takes apart a collective that is in flight, and NCCL's threads may still
        # use what an aborted communicator had: then a process that has failed would end by a signal.
        is_in_flight = any(thread.is_busy for thread in shared.endpoint.threads)
        if is_in_flight or (has_failed and shared.endpoint.watchdog.has_groups):
            logging.shutdown()
            sys.stdout.flush()
            os._exit(_exit_status.code)
    _endpoints.clear()
