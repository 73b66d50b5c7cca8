"""A rank's log of the native calls of one group, which the coordinator compares while the calls run.

c10d neither checks that ranks make the same calls nor says for whom it waits. To ask all ranks before each call would
cost a round trip; instead every rank tells the coordinator what it called at the same few numbers, without waiting.
"""

import struct
import threading
import time
import zlib
from collections import deque
from collections.abc import Sequence

from mimatrix.comm.calls import COLLECTIVES, DTYPES, REDUCE_OPS, CallSignature
from mimatrix.comm.control.call_comparison import KEPT_CALLS, CallEntry, CallReport
from mimatrix.comm.control.client import ControlClient
from mimatrix.comm.control.unfinished_calls import begun_name
from mimatrix.comm.control.user_calls import UserCall

_REPORTED_CALLS = 16
"""How many calls a regular report has."""
_FIRST = 8
_EVERY_AT_FIRST, _EVERY = 16, 1024
_REPORT_EVERY_S = 1.0
_PACKED = struct.Struct("<QIIIII")
_CODES: dict[object, int] = {part: zlib.crc32(str(part).encode()) for part in (*COLLECTIVES, *DTYPES, *REDUCE_OPS)}
_LoggedCall = tuple[int, int, int, CallSignature, UserCall | None]
"""Its number, the digests before and after it, the call, and the user's call."""


class CallLog:
    """The calls of one group on this rank; several threads may add to it.

    Every call has a number from 1 on. `ControlClient.begun` has the last one under `begun_name(group)`. A group's name
    is used for one log only.
    """

    def __init__(self, group: str, members: Sequence[int], control: ControlClient) -> None:
        self.group, self._members, self._control = group, tuple(members), control
        self.number = 0
        """How many calls were added."""
        self._digest = 0
        self._recent: deque[_LoggedCall] = deque(maxlen=KEPT_CALLS)
        self._begun_name = begun_name(group)
        self._reported_s = float("-inf")
        self._lock = threading.Lock()

    def add(self, call: CallSignature, user_call: UserCall | None) -> int:
        """Add a call that begins now, and return its number; at some numbers report it, without waiting."""
        packed = _pack(call)
        with self._lock:
            self.number = number = self.number + 1
            before, self._digest = self._digest, zlib.crc32(packed, self._digest)
            self._recent.append((number, before, self._digest, call, user_call))
            self._control.begun[self._begun_name] = number
            recent = list(self._recent)[-_REPORTED_CALLS:] if is_reported(number) else None
        if recent:
            self._post(recent)
        return number

    def report(self) -> None:
        """Report all calls that are remembered, at most once a second; for a thread that waits, or has failed."""
        now_s = time.monotonic()
        with self._lock:
            if now_s - self._reported_s < _REPORT_EVERY_S or not self._recent:
                return
            self._reported_s, recent = now_s, list(self._recent)
        self._post(recent)

    def _post(self, recent: list[_LoggedCall]) -> None:
        entries = (
            CallEntry(number, before, digest, call.describe_request(), user_call)
            for number, before, digest, call, user_call in recent
        )
        self._control.post_calls(CallReport(self.group, self._members, tuple(entries)))


def is_reported(number: int) -> bool:
    """Return whether all ranks report at this number: the first few, then regularly, later less often."""
    every = _EVERY_AT_FIRST if number < _EVERY else _EVERY
    return number <= _FIRST or number % every == 0


def _pack(call: CallSignature) -> bytes:
    """Return what is asked for as bytes, without the algorithm: that may not be chosen yet."""
    parts = call.collective, call.dtype, call.reduce_op
    try:
        codes = [_CODES[part] for part in parts]
    except KeyError:  # c10d carries more types and operations than windows do
        codes = [zlib.crc32(str(part).encode()) for part in parts]
    return _PACKED.pack(call.count, call.root, call.shares, *codes)
