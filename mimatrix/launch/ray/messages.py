"""What goes between the server and node agents: JSON text with a protocol number, and errors as values."""

import base64
import json
from collections.abc import Mapping
from typing import Any

from mimatrix.core.errors import MiMatrixError, UserError, WorldError
from mimatrix.launch.launcher import LogPart
from mimatrix.launch.ray.nodes import Raylet
from mimatrix.launch.ray.split import FirstFailure, NodePart, PartState
from mimatrix.launch.start_failure import StartError
from mimatrix.launch.team_json import (
    DECODE_ERRORS,
    decode_strings,
    decode_team,
    decode_team_state,
    encode_team,
    encode_team_state,
)

PROTOCOL = 1


class ProtocolError(WorldError):
    """A message came from another version of MiMatrix, or is not one at all."""


def encode_request(method: str, arguments: Mapping[str, Any]) -> str:
    """Return the text of a request."""
    return json.dumps({"protocol": PROTOCOL, "method": method, "arguments": dict(arguments)})


def decode_request(text: str) -> tuple[str, dict[str, Any]]:
    """Return method and arguments of a request; raise a `ProtocolError` for anything else."""
    message = _decode(text)
    try:
        return str(message["method"]), dict(message["arguments"])
    except DECODE_ERRORS:
        raise ProtocolError("a message between the server and a node cannot be read") from None


def encode_answer(value: Any) -> str:
    """Return the text of a reply."""
    return json.dumps({"protocol": PROTOCOL, "value": value})


def encode_error(error: MiMatrixError) -> str:
    """Return the text of a reply that refuses the request."""
    kind = "start" if isinstance(error, StartError) else "user" if isinstance(error, UserError) else "world"
    is_transient = isinstance(error, StartError) and error.is_transient
    described = {"kind": kind, "sentence": str(error), "is_transient": is_transient}
    return json.dumps({"protocol": PROTOCOL, "error": described})


def decode_reply(text: str) -> Any:
    """Return the value of a reply, or a `MiMatrixError` that says why there is none."""
    try:
        message = _decode(text)
        if "error" not in message:
            return message["value"]
        error = message["error"]
        if error["kind"] == "start":
            return StartError(str(error["sentence"]), is_transient=bool(error["is_transient"]))
        return (UserError if error["kind"] == "user" else WorldError)(str(error["sentence"]))
    except ProtocolError as error:
        return error
    except DECODE_ERRORS:
        return ProtocolError("a message between the server and a node cannot be read")


def encode_part(part: NodePart) -> dict[str, Any]:
    """Return what one node is to start as plain data."""
    ranks, peers = list(part.ranks), list(part.peers)
    return {"team": encode_team(part.team), "ranks": ranks, "peers": peers, "start_id": part.start_id}


def decode_part(data: Mapping[str, Any]) -> NodePart:
    """Return the part that `encode_part` wrote."""
    ranks, peers = tuple(map(int, data["ranks"])), decode_strings(data["peers"])
    return NodePart(decode_team(data["team"]), ranks, peers, str(data["start_id"]))


def encode_part_state(state: PartState | None) -> dict[str, Any] | None:
    """Return what a node knows about its part as plain data."""
    if state is None:
        return None
    return {"team": encode_team_state(state.team), "failure": encode_failure(state.failure)}


def decode_part_state(data: Mapping[str, Any] | None) -> PartState | None:
    """Return the state that `encode_part_state` wrote."""
    return None if data is None else PartState(decode_team_state(data["team"]), decode_failure(data["failure"]))


def encode_failure(failure: FirstFailure | None) -> dict[str, Any] | None:
    """Return a team's first failure as plain data."""
    return None if failure is None else {"rank": failure.rank, "at_s": failure.at_s}


def decode_failure(data: Mapping[str, Any] | None) -> FirstFailure | None:
    """Return the failure that `encode_failure` wrote."""
    return None if data is None else FirstFailure(int(data["rank"]), float(data["at_s"]))


def encode_log_part(part: LogPart) -> dict[str, Any]:
    """Return a piece of output as plain data."""
    return {"data": base64.b64encode(part.data).decode(), "next_offset": part.next_offset}


def decode_log_part(data: Mapping[str, Any]) -> LogPart:
    """Return the piece that `encode_log_part` wrote."""
    return LogPart(base64.b64decode(data["data"]), int(data["next_offset"]))


def encode_raylet(raylet: Raylet) -> dict[str, Any]:
    """Return what Ray says about a node as plain data."""
    return {
        "id": raylet.id,
        "name": raylet.name,
        "address": raylet.address,
        "is_alive": raylet.is_alive,
        "resources": dict(raylet.resources),
        "labels": dict(raylet.labels),
        "ending": raylet.ending,
    }


def decode_raylet(data: Mapping[str, Any]) -> Raylet:
    """Return the node that `encode_raylet` wrote."""
    return Raylet(
        str(data["id"]),
        str(data["name"]),
        str(data["address"]),
        bool(data["is_alive"]),
        {str(name): float(value) for name, value in data["resources"].items()},
        {str(name): str(value) for name, value in data["labels"].items()},
        str(data["ending"]),
    )


def _decode(text: str) -> dict[str, Any]:
    try:
        message = dict(json.loads(text))
        protocol = message["protocol"]
    except DECODE_ERRORS:
        raise ProtocolError("a message between the server and a node cannot be read") from None
    if protocol != PROTOCOL:
        raise ProtocolError(
            f"server and node use different protocols ({PROTOCOL} and {protocol}); install the same version of "
            "MiMatrix on all machines, and start Ray again"
        )
    return message
