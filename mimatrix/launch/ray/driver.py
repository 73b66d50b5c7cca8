"""`python -m mimatrix.launch.ray.driver ADDRESS PLACE FD`: the process that speaks with Ray, for one launcher.

Ray ends a process that it is connected from when the cluster is gone, and waits without a deadline in some places. So
this is not the server's process. It ends with the launcher that started it, and keepers go on.
"""

import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mimatrix.core.errors import MiMatrixError, WorldError
from mimatrix.launch.ray.driver_client import CONNECTED, Answer, Archive, Ask, Refused, Reply, Silent, Told
from mimatrix.launch.ray.node_agent import NodeKeeper, actor_name
from mimatrix.launch.ray.nodes import Raylet

_THREADS = 16
_REACHED_S = 3.0


class Driver:
    """Connected to one cluster, with the keepers of one place in it."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._keepers: dict[str, Any] = {}

    def raylets(self) -> tuple[Raylet, ...]:
        """All that Ray knows of, also those that are gone."""
        told: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        return tuple(map(_raylet, told))

    def ask(self, calls: Mapping[str, tuple[Any, ...]], method: str, within_s: float) -> dict[str, Reply]:
        """Call a method of the keepers on these nodes, all at once, with the arguments of each."""
        raylets = {raylet.id: raylet for raylet in self.raylets()}
        archives = {each for arguments in calls.values() for each in arguments if isinstance(each, Archive)}
        shipped = {archive: ray.put(archive.path.read_bytes()) for archive in archives}
        under_way: dict[Any, str] = {}
        replies: dict[str, Reply] = {}
        for node, arguments in calls.items():
            if node not in raylets or not raylets[node].is_alive:
                replies[node] = Silent("Ray has lost it")
                continue
            words = [shipped[each] if isinstance(each, Archive) else each for each in arguments]
            try:
                under_way[getattr(self._keeper(raylets[node]), method).remote(*words)] = node
            except (RayError, ValueError) as error:
                replies[node] = Silent(_first_line(error))
        if under_way:
            ray.wait(list(under_way), num_returns=len(under_way), timeout=within_s)
        return replies | {node: self._take(node, call, within_s) for call, node in under_way.items()}

    def _take(self, node: str, call: Any, within_s: float) -> Reply:
        try:
            return Answer(ray.get(call, timeout=0))
        except GetTimeoutError:
            return Silent(f"no answer within {within_s:g} s")
        except RayTaskError as error:
            if isinstance(error.cause, MiMatrixError):
                return Refused(error.cause)
            return Silent(_last_line(error))
        except RayActorError as error:
            if isinstance(error, ActorDiedError):
                # The next call starts another one, if the node is still there.
                self._keepers.pop(node, None)
            return Silent("its keeper does not answer")

    def _keeper(self, raylet: Raylet) -> Any:
        """The one that is there, or a new one."""
        if raylet.id not in self._keepers:
            self._keepers[raylet.id] = (
                ray.remote(NodeKeeper)
                .options(
                    name=actor_name(raylet.id),
                    namespace=self._place,
                    lifetime="detached",
                    get_if_exists=True,
                    num_cpus=0,
                    max_restarts=0,
                    max_concurrency=_THREADS,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(raylet.id, soft=False),
                )
                .remote(raylet, self._place)
            )
        return self._keepers[raylet.id]


def main(address: str, place: str, descriptor: int) -> None:
    """Connect, say so, and answer until nobody asks any more."""
    line = Connection(descriptor)
    try:
        _connect(address, place)
    except MiMatrixError as error:
        line.send(Told(CONNECTED, error))
        return
    line.send(Told(CONNECTED, None))
    _serve(line, Driver(place))


def _connect(address: str, place: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        if host:
            # Ray itself would try for a minute.
            socket.create_connection((host.strip("[]"), int(port)), timeout=_REACHED_S).close()
        ray.init(address=address, namespace=place, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError, RayError) as error:
        raise WorldError(
            f"Ray at {address} cannot be used ({_first_line(error)}); see that it runs, also on this machine, and "
            "that the token is the same everywhere"
        ) from None


def _serve(line: Connection, driver: Driver) -> None:
    methods: dict[str, Callable[..., Any]] = {"raylets": driver.raylets, "ask": driver.ask}
    with ThreadPoolExecutor(_THREADS) as pool:
        while True:
            try:
                asked: Ask = line.recv()
            except (EOFError, OSError):
                # Whoever waits in Ray would keep us here.
                os._exit(0)
            pool.submit(_answer, line, asked, methods[asked.method])


def _answer(line: Connection, asked: Ask, method: Callable[..., Any]) -> None:
    told: Any
    try:
        told = method(*asked.arguments)
    except Exception as error:  # noqa: BLE001 (whatever Ray raises, whoever asked is to know)
        told = WorldError(f"Ray gave way: {_first_line(error)}")
    with suppress(OSError):
        line.send(Told(asked.number, told))


def _raylet(told: Mapping[str, Any]) -> Raylet:
    return Raylet(
        told["NodeID"],
        told["NodeName"] or told["NodeManagerHostname"],
        told["NodeManagerAddress"],
        bool(told["Alive"]),
        told["Resources"],
        told["Labels"],
        str(told.get("DeathReasonMessage", "")).strip().rstrip("."),
    )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _last_line(error: Exception) -> str:
    return next(reversed(str(error).strip().splitlines()), type(error).__name__)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
