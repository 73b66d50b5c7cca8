import socket

from mimatrix.comm.control.client import ControlClient
from mimatrix.comm.control.coordinator import Coordinator
from mimatrix.comm.control.messages import ControlMessage, MessageType


def test_coordinator_ignores_strangers_and_keeps_serving_its_ranks() -> None:
    coordinator = Coordinator.start("127.0.0.1", generation=3)
    old = ControlMessage(MessageType.HELLO, 2, {"rank": 0, "host": "old", "token": coordinator.token}).encode()
    forged = ControlMessage(MessageType.HELLO, 3, {"rank": 0, "host": "a", "token": "guessed"}).encode()
    unasked = ControlMessage(MessageType.FAULT, 3, {"text": "believe me"}).encode()
    for greeting in (b"GET / HTTP/1.1\r\n\r\n", old, forged, unasked, b""):
        with socket.create_connection(("127.0.0.1", coordinator.port)) as stranger:
            stranger.sendall(greeting)
            stranger.shutdown(socket.SHUT_WR)
            stranger.settimeout(5)
            assert stranger.recv(100) == b"", "it is not answered"
    lines = [
        ControlClient.connect(rank, ["a", "b"], "127.0.0.1", coordinator.port, 3, coordinator.token)
        for rank in range(2)
    ]
    for line in lines:
        line.arrive("g", 1, [0, 1], f"from {line.rank}")
    assert [line.wait_arrivals("g", 1, 5) for line in lines] == [["from 0", "from 1"]] * 2
    for line in lines:
        line.close()
    coordinator.close()
