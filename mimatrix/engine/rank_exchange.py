"""Small messages among all ranks, and errors that every rank raises if one fails."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch

from mimatrix.collectives.shares import Shares
from mimatrix.comm.group import Group
from mimatrix.core.errors import MiMatrixError, UserError, WorldError

_ROW_BYTES = 2048
_LENGTH_BYTES = 8
Message = dict[str, Any]


class RankExchange:
    """Gathers a small JSON message from every rank in one collective; floats arrive exactly as they were sent."""

    def __init__(self, group: Group | None) -> None:
        self._group = group
        self._rows: torch.Tensor | None = None
        """The buffer of one exchange, kept for the next."""

    def all_gather(self, message: Mapping[str, Any]) -> list[Message]:
        """Return the messages of all ranks, in order, on every rank. A collective."""
        if self._group is None or self._group.world_size == 1:
            return [dict(message)]
        text = json.dumps(message).encode()
        rows = self._gather(self._group, text[: _ROW_BYTES - _LENGTH_BYTES], len(text), _ROW_BYTES)
        longest = max(length for length, _ in rows)
        if longest > _ROW_BYTES - _LENGTH_BYTES:
            rows = self._gather(self._group, text, len(text), longest + _LENGTH_BYTES)
        return [json.loads(row[:length]) for length, row in rows]

    def _gather(self, group: Group, text: bytes, length: int, row_bytes: int) -> list[tuple[int, bytes]]:
        row_bytes = -(-row_bytes // _LENGTH_BYTES) * _LENGTH_BYTES
        if self._rows is None:
            self._rows = _allocate(group, group.world_size * _ROW_BYTES)
        is_usual = row_bytes == _ROW_BYTES
        flat = self._rows if is_usual else torch.zeros(group.world_size * row_bytes, dtype=torch.uint8)
        table = flat.view(group.world_size, row_bytes)
        own = length.to_bytes(_LENGTH_BYTES, "little") + text
        table[group.rank, : len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        group.all_gather(table.view(-1), shares=Shares.equal(group.world_size))
        rows = [bytes(row.numpy().tobytes()) for row in table]
        return [(int.from_bytes(row[:_LENGTH_BYTES], "little"), row[_LENGTH_BYTES:]) for row in rows]


def _allocate(group: Group, count: int) -> torch.Tensor:
    """Allocate where peers can read it in place, if ranks share such memory."""
    in_arena = group.window_kind(torch.empty(0)) == "host" and "windows" in group.transports
    return group.empty(count, torch.uint8) if in_arena else torch.zeros(count, dtype=torch.uint8)


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
        WorldError: With `action`; its cause is this rank's own error, if it has one, or a `UserError` if that was the
            failing rank's error.
        UserError: Without `action`.
    """
    result, error = None, None
    try:
        result = task()
    except Exception as raised:  # noqa: BLE001 (the other ranks wait for a message; it is raised after that)
        error = raised
    is_user_error = isinstance(error, UserError)
    messages = exchange.all_gather({"error": _describe_error(error), "by_user": is_user_error, "result": result})
    if error and not action and not isinstance(error, UserError):
        raise error
    for rank, message in enumerate(messages):
        if not message["error"]:
            continue
        if action:
            cause = error or (UserError(message["error"]) if message["by_user"] else None)
            raise WorldError(f"rank {rank} could not {action}: {message['error']}") from cause
        is_named = len(messages) == 1 or message["error"].startswith("rank")
        raise UserError(message["error"] if is_named else f"rank {rank}: {message['error']}")
    return [message["result"] for message in messages]


def _describe_error(error: Exception | None) -> str:
    if error is None:
        return ""
    if isinstance(error, MiMatrixError) and str(error):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
