"""The job's key-value store: what ranks tell each other that strangers must not read. No sockets, and no clock.

It lies behind the job's token, unlike the store of torch.distributed, which answers everyone who reaches its port.
"""

from dataclasses import dataclass, field
from typing import Any

MAX_KEY_CHARACTERS = 512
MAX_VALUE_CHARACTERS = 1 << 18
MAX_TOTAL_CHARACTERS = 64 << 20
MAX_WAIT_S = 86_400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreRequest:
    """What a rank asks of the store."""

    number: int
    """By which the rank knows the reply."""
    operation: str
    key: str
    value: str = ""
    expected: str = ""
    timeout_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` reads."""
        return {
            "number": self.number,
            "operation": self.operation,
            "key": self.key,
            "value": self.value,
            "expected": self.expected,
            "timeout_s": self.timeout_s,
        }

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> "StoreRequest":
        """Return the request that a message carries.

        Raises:
            ValueError: A field is missing, of the wrong type, or too long.
        """
        match body:
            case {
                "number": int(number),
                "operation": str(operation),
                "key": str(key),
                "value": str(value),
                "expected": str(expected),
                "timeout_s": int() | float() as timeout_s,
            } if len(key) <= MAX_KEY_CHARACTERS and max(len(value), len(expected)) <= MAX_VALUE_CHARACTERS:
                return cls(
                    number=number,
                    operation=operation,
                    key=key,
                    value=value,
                    expected=expected,
                    timeout_s=min(max(0.0, timeout_s), MAX_WAIT_S),
                )
        raise ValueError("a request to the job's store has a field of the wrong type or length")


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreReply:
    """The answer to one request; `value` is None if the key was not written before the deadline."""

    rank: int
    number: int
    value: str | None
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return the body of the message to the rank."""
        return {"number": self.number, "value": self.value, "error": self.error}


@dataclass(frozen=True, slots=True)
class _WaitingRequest:
    rank: int
    request: StoreRequest
    until_s: float


@dataclass(slots=True)
class KeyValueStore:
    """Values by key, and the requests that wait for keys that are not written yet."""

    values: dict[str, str] = field(default_factory=dict)
    _characters: int = 0
    _waiting: dict[str, list[_WaitingRequest]] = field(default_factory=dict)

    @property
    def is_awaited(self) -> bool:
        """Whether requests wait for keys."""
        return bool(self._waiting)

    def handle(self, rank: int, request: StoreRequest, now_s: float) -> list[StoreReply]:
        """Do what a rank asks; return its reply, if it need not wait, and those that a new value lets go."""
        try:
            match request.operation:
                case "get":
                    return self._get(rank, request, now_s)
                case "set":
                    return self._write(rank, request, request.value, reply="")
                case "add":
                    value = str(int(self.values.get(request.key, "0")) + int(request.value))
                    return self._write(rank, request, value, reply=value)
                case "compare_set":
                    return self._compare_set(rank, request)
            raise ValueError(f'unknown operation "{request.operation}"')
        except ValueError as error:
            return [StoreReply(rank=rank, number=request.number, value=None, error=str(error))]

    def expire(self, now_s: float) -> list[StoreReply]:
        """Return the replies to requests whose deadline has passed."""
        replies = []
        for key, waiting in list(self._waiting.items()):
            late = [wait for wait in waiting if wait.until_s <= now_s]
            replies += [StoreReply(rank=wait.rank, number=wait.request.number, value=None) for wait in late]
            self._keep(key, [wait for wait in waiting if wait.until_s > now_s])
        return replies

    def forget(self, rank: int) -> None:
        """Drop the requests of a rank that is gone; what it has written stays."""
        for key, waiting in list(self._waiting.items()):
            self._keep(key, [wait for wait in waiting if wait.rank != rank])

    def _get(self, rank: int, request: StoreRequest, now_s: float) -> list[StoreReply]:
        if request.key in self.values or not request.timeout_s:
            return [StoreReply(rank=rank, number=request.number, value=self.values.get(request.key))]
        wait = _WaitingRequest(rank, request, now_s + request.timeout_s)
        self._waiting.setdefault(request.key, []).append(wait)
        return []

    def _compare_set(self, rank: int, request: StoreRequest) -> list[StoreReply]:
        """Write the value if the key has the expected one, or none and the expected one is empty."""
        present = self.values.get(request.key, "")
        if present != request.expected:
            return [StoreReply(rank=rank, number=request.number, value=present)]
        return self._write(rank, request, request.value, reply=request.value)

    def _write(self, rank: int, request: StoreRequest, value: str, *, reply: str) -> list[StoreReply]:
        growth = len(value) - len(self.values.get(request.key, ""))
        growth += 0 if request.key in self.values else len(request.key)
        if self._characters + growth > MAX_TOTAL_CHARACTERS:
            raise ValueError(f"it is full: it holds at most {MAX_TOTAL_CHARACTERS >> 20} MiB of keys and values")
        self._characters += growth
        self.values[request.key] = value
        waiting = self._waiting.pop(request.key, [])
        own = StoreReply(rank=rank, number=request.number, value=reply)
        return [own, *(StoreReply(rank=wait.rank, number=wait.request.number, value=value) for wait in waiting)]

    def _keep(self, key: str, waiting: list[_WaitingRequest]) -> None:
        if waiting:
            self._waiting[key] = waiting
        else:
            del self._waiting[key]
