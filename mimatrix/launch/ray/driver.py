"""The process that speaks with Ray for one launcher: `python -m mimatrix.launch.ray.driver ADDRESS NAMESPACE FD`.

Ray ends a process that is connected to it when the cluster is gone, and waits without a deadline in some places. So
this is not the server's process. It ends with the launcher that started it; node agents keep running.
"""

import logging
import os
import socket
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import ActorDiedError, GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mimatrix.core.errors import MiMatrixError, WorldError
from mimatrix.launch.ray.driver_client import CONNECTED, DriverCall, DriverResult, receive, send
from mimatrix.launch.ray.messages import encode_raylet
from mimatrix.launch.ray.node_agent import NodeAgent, actor_name
from mimatrix.launch.ray.nodes import Raylet

_THREADS = 16
_REACHED_S = 3.0


class Driver:
    """Connected to one cluster, with the node agents of one namespace in it."""

    def __init__(self, namespace: str) -> None:
        self._namespace = namespace
        self._agents: dict[str, Any] = {}

    def raylets(self) -> list[dict[str, Any]]:
        """Return all nodes that Ray knows, also those that are gone."""
        return [encode_raylet(raylet) for raylet in self._raylets()]

    def ask(self, requests: Mapping[str, str], archive: str, within_s: float) -> dict[str, dict[str, str]]:
        """Send requests to the agents on these nodes, all at once.

        Args:
            requests: The text for each node.
            archive: Path of a file whose content goes with each request; none if empty.
            within_s: How long to wait for replies.

        Returns:
            For each node `reply`, the text, or `silent`, why there is none.
        """
        raylets = {raylet.id: raylet for raylet in self._raylets()}
        content = [ray.put(Path(archive).read_bytes())] if archive else []
        calls: dict[Any, str] = {}
        replies: dict[str, dict[str, str]] = {}
        for node, request in requests.items():
            if node not in raylets or not raylets[node].is_alive:
                replies[node] = {"silent": "Ray has lost it"}
                continue
            try:
                calls[self._agent(raylets[node]).handle.remote(request, *content)] = node
            except (RayError, ValueError) as error:
                replies[node] = {"silent": _first_line(error)}
        if calls:
            ray.wait(list(calls), num_returns=len(calls), timeout=within_s)
        return replies | {node: self._take(node, call, within_s) for call, node in calls.items()}

    def _raylets(self) -> tuple[Raylet, ...]:
        nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
        return tuple(map(_raylet, nodes))

    def _take(self, node: str, call: Any, within_s: float) -> dict[str, str]:
        try:
            return {"reply": str(ray.get(call, timeout=0))}
        except GetTimeoutError:
            return {"silent": f"no answer within {within_s:g} s"}
        except RayTaskError as error:
            return {"silent": _last_line(error)}
        except RayActorError as error:
            if isinstance(error, ActorDiedError):
                # The next call starts another one, if the node is still there.
                self._agents.pop(node, None)
            return {"silent": "its agent does not answer"}

    def _agent(self, raylet: Raylet) -> Any:
        """Return the agent of a node; start one if there is none."""
        if raylet.id not in self._agents:
            self._agents[raylet.id] = (
                ray.remote(NodeAgent)
                .options(
                    name=actor_name(raylet.id),
                    namespace=self._namespace,
                    lifetime="detached",
                    get_if_exists=True,
                    num_cpus=0,
                    max_restarts=0,
                    max_concurrency=_THREADS,
                    scheduling_strategy=NodeAffinitySchedulingStrategy(raylet.id, soft=False),
                )
                .remote(encode_raylet(raylet), self._namespace)
            )
        return self._agents[raylet.id]


def main(address: str, namespace: str, descriptor: int) -> None:
    """Connect, say so, and answer until the launcher is gone."""
    line = Connection(descriptor)
    try:
        _connect(address, namespace)
    except MiMatrixError as error:
        send(line, DriverResult(CONNECTED, error=str(error)))
        return
    send(line, DriverResult(CONNECTED))
    _serve(line, Driver(namespace))


def _connect(address: str, namespace: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        if host:
            # Ray itself would try for a minute.
            socket.create_connection((host.strip("[]"), int(port)), timeout=_REACHED_S).close()
        ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level=logging.ERROR)
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
                call = DriverCall(**receive(line))
            except (EOFError, OSError):
                # Threads that wait for Ray would keep us here.
                os._exit(0)
            pool.submit(_answer, line, call, methods[call.method])


def _answer(line: Connection, call: DriverCall, method: Callable[..., Any]) -> None:
    try:
        result = DriverResult(call.number, value=method(*call.arguments))
    except Exception as error:  # noqa: BLE001 (whatever Ray raises, the launcher is to know)
        result = DriverResult(call.number, error=f"Ray failed: {_first_line(error)}")
    with suppress(OSError):
        send(line, result)


def _raylet(node: Mapping[str, Any]) -> Raylet:
    return Raylet(
        node["NodeID"],
        node["NodeName"] or node["NodeManagerHostname"],
        node["NodeManagerAddress"],
        bool(node["Alive"]),
        node["Resources"],
        node["Labels"],
        str(node.get("DeathReasonMessage", "")).strip().rstrip("."),
    )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _last_line(error: Exception) -> str:
    return next(reversed(str(error).strip().splitlines()), type(error).__name__)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
