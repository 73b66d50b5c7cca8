"""A rank's view of the job's key-value store, which the coordinator keeps."""

import itertools
from typing import TYPE_CHECKING, Protocol

from mimatrix.comm.control.key_value_store import MAX_KEY_CHARACTERS, MAX_VALUE_CHARACTERS, StoreRequest
from mimatrix.core.errors import UserError, WorldError

if TYPE_CHECKING:
    from mimatrix.comm.control.client import ControlClient

_ANSWER_S = 30.0
"""How long the store may take for what does not wait for another rank."""


class Store(Protocol):
    """A key-value store that all ranks reach, such as those of torch.distributed."""

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        ...

    def get(self, key: str) -> bytes:
        """Wait until a value is written, and return it."""
        ...


class JobStore:
    """Keys and values that all ranks of a job share, which no other process can read. Values are text.

    Example:
        >>> store = JobStore(control)
        >>> store.set("rank/0", "here")
        >>> store.get("rank/0", timeout_s=60)
        b'here'
    """

    def __init__(self, control: "ControlClient", timeout_s: float = 300.0) -> None:
        self._control, self._timeout_s = control, timeout_s
        self._numbers = itertools.count()

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        self._request("set", key, value)

    def get(self, key: str, timeout_s: float | None = None) -> bytes:
        """Wait until a key is written, and return its value.

        Raises:
            WorldError: It was not written in time, or a rank or the coordinator was lost.
        """
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        value = self._request("get", key, timeout_s=limit_s)
        if value is None:
            raise WorldError(f"the job's store has no {key} after {limit_s:g} s; see the output of all ranks")
        return value.encode()

    def wait(self, keys: list[str], timeout_s: float | None = None) -> None:
        """Wait until all keys are written.

        Raises:
            WorldError: One was not written in time, or a rank or the coordinator was lost.
        """
        for key in keys:
            self.get(key, timeout_s)

    def add(self, key: str, amount: int) -> int:
        """Add to a number, which is 0 if it has not been written, and return the sum."""
        return int(self._request("add", key, str(amount)) or "")

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write `desired` if the key has the value `expected`, or none and that is empty; return the value after it."""
        return (self._request("compare_set", key, desired, expected=expected) or "").encode()

    def _request(
        self, operation: str, key: str, value: str = "", *, expected: str = "", timeout_s: float = 0.0
    ) -> str | None:
        if len(key) > MAX_KEY_CHARACTERS or len(value) > MAX_VALUE_CHARACTERS:
            raise UserError(
                f"a key of {len(key)} and a value of {len(value)} characters do not fit into the job's store; use at "
                f"most {MAX_KEY_CHARACTERS} and {MAX_VALUE_CHARACTERS}"
            )
        number = next(self._numbers)
        request = StoreRequest(
            number=number, operation=operation, key=key, value=value, expected=expected, timeout_s=timeout_s
        )
        reply = self._control.request(number, request.to_json(), timeout_s or _ANSWER_S)
        if reply["error"]:
            raise WorldError(f"the job's store refuses to {operation} {key}: {reply['error']}; see the other ranks")
        found: str | None = reply["value"]
        return found
