"""Where services listen, and a stream to one of them."""

import socket
from dataclasses import dataclass

from mimatrix.core.errors import WorldError
from mimatrix.hybrid.net import Connection, own_side


@dataclass(frozen=True, slots=True)
class Address:
    """Where a service listens."""

    address: str
    port: int

    def to_json(self) -> list[str | int]:
        """For a head."""
        return [self.address, self.port]


def greeted(place: Address, token: str, timeout_s: float, *, group: int | None = None) -> Connection:
    """A stream to a service that knows us: a group, or another service."""
    stream = Connection(socket.create_connection((place.address, place.port), timeout=timeout_s), timeout_s)
    try:
        stream.send({"token": token, "group": group, **own_side()})
        answer, _ = stream.receive()
        if "error" in answer:
            raise WorldError(str(answer["error"]))
        stream.meet(answer)
    except BaseException:
        stream.close()
        raise
    return stream
