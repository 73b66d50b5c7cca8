"""Bare connections to a coordinator, for tests that send what no `ControlClient` would."""

import socket

from mimatrix.comm.control.coordinator import Coordinator
from mimatrix.comm.control.messages import ControlMessage, MessageType, greeting

GENERATION = 3


def start_coordinator(world_size: int, **options: object) -> Coordinator:
    """Start a coordinator on a thread of this process."""
    return Coordinator.start("127.0.0.1", GENERATION, world_size=world_size, **options)  # type: ignore[arg-type]


def greet(coordinator: Coordinator, rank: int, host: str) -> socket.socket:
    """Return a connection that has shown the token and has said which rank it is."""
    stream = socket.create_connection(("127.0.0.1", coordinator.port), timeout=10)
    hello = ControlMessage(MessageType.HELLO, GENERATION, {"rank": rank, "host": host})
    stream.sendall(greeting(coordinator.token, GENERATION) + hello.encode())
    return stream
