"""What ranks tell one another at the end of a global batch: a few figures each, gathered in one small collective."""

import json
from collections.abc import Callable
from typing import Any

import torch

from mimatrix.collectives.shares import Shares
from mimatrix.comm.group import Group
from mimatrix.core.errors import MiMatrixError, UserError, WorldError

_ROOM = 2048
Message = dict[str, Any]


class RankExchange:
    """Gathers a small message from every rank. JSON: a float comes back as the same float."""

    def __init__(self, group: Group | None) -> None:
        self._group = group
        self._box: torch.Tensor | None = None

    def all(self, message: Message) -> list[Message]:
        """The messages of all ranks, in their order, on every rank. A collective: all must call it."""
        if self._group is None or self._group.size == 1:
            return [message]
        text = json.dumps(message).encode()
        heads = self._gathered(text[: _ROOM - 8], len(text), _ROOM)
        longest = max(length for length, _ in heads)
        if longest > _ROOM - 8:
            heads = self._gathered(text, len(text), longest + 8)
        return [json.loads(found[:length]) for length, found in heads]

    def _placed(self, count: int) -> torch.Tensor:
        """Where peers can read it in place, if ranks have such a place."""
        assert self._group
        placed = self._group.where(torch.empty(0)) == "host" and "windows" in self._group.paths
        return self._group.empty(count, torch.uint8) if placed else torch.zeros(count, dtype=torch.uint8)

    def _gathered(self, text: bytes, length: int, room: int) -> list[tuple[int, bytes]]:
        assert self._group
        size, me = self._group.size, self._group.me
        room = -(-room // 8) * 8
        if self._box is None:
            self._box = self._placed(size * _ROOM)
        box = (self._box if room == _ROOM else torch.zeros(size * room, dtype=torch.uint8)).view(size, room)
        mine = length.to_bytes(8, "little") + text
        box[me, : len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        self._group.all_gather(box.view(-1), shares=Shares.equal(size))
        rows = [bytes(row.numpy().tobytes()) for row in box]
        return [(int.from_bytes(row[:8], "little"), row[8:]) for row in rows]


def gather_or_raise(exchange: RankExchange, task: Callable[[], Any], *, action: str | None = None) -> list[Any]:
    """Run `task` on every rank and return the results of all ranks; if it fails on one, raise on all. A collective.

    Args:
        exchange: How the ranks tell each other.
        task: Runs on this rank. JSON must be able to hold its result.
        action: What a failing rank could not do, e.g. "write its part": every rank then raises a `WorldError` that
            names the rank. If omitted, every rank raises a `UserError` instead, except that a rank on which `task`
            raised anything else raises that itself.

    Returns:
        The results of all ranks, in order.

    Raises:
        WorldError: With `action`; its cause is this rank's own error, if it has one.
        UserError: Without `action`.
    """
    result, error = None, None
    try:
        result = task()
    except Exception as raised:  # noqa: BLE001 (the other ranks wait for a message; it is raised after that)
        error = raised
    messages = exchange.all({"error": _describe_error(error), "result": result})
    if error and not action and not isinstance(error, UserError):
        raise error
    for rank, message in enumerate(messages):
        if not message["error"]:
            continue
        if action:
            raise WorldError(f"rank {rank} could not {action}: {message['error']}") from error
        is_named = len(messages) == 1 or message["error"].startswith("rank")
        raise UserError(message["error"] if is_named else f"rank {rank}: {message['error']}")
    return [message["result"] for message in messages]


def _describe_error(error: Exception | None) -> str:
    if error is None:
        return ""
    if isinstance(error, MiMatrixError) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
