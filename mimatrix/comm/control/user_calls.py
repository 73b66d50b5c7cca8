"""Which of the user's calls a rank is in: collectives carry it, so that ranks that disagree can name calls and lines.

What calls are named is up to the caller; here they are only compared, by their keys, and shown.
"""

import json
import sys
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mimatrix.core.errors import WorldError

_PACKAGE = str(Path(__file__).resolve().parents[2])
PACKED_BYTES = 320
"""The longest description of a call that is exchanged."""


@dataclass(frozen=True)
class UserCall:
    """One call of the user's script, as other ranks are told about it."""

    name: str
    """For example `run.evaluate`."""
    key: str
    """Calls with the same key belong together, such as all that end a global batch."""
    verb: str = "called"
    fix: str = ""
    """What to do if other ranks make another call; by default to make it on all ranks."""
    place: str = ""
    """For example `train.py, line 41`; empty if it is not known."""

    def __str__(self) -> str:
        return f"{self.name} ({self.place})" if self.place else self.name

    @cached_property
    def code(self) -> int:
        """A number for the key, never 0."""
        return zlib.crc32(self.key.encode()) or 1

    @cached_property
    def packed(self) -> bytes:
        """The call as other ranks read it with `unpack`, always of the same length."""
        text = json.dumps(self.to_json()).encode()
        if len(text) > PACKED_BYTES:
            return UserCall(self.name[:40], self.key[:40]).packed
        return text.ljust(PACKED_BYTES, b"\0")

    def to_json(self) -> list[str]:
        """Return what `from_json` reads."""
        return [self.name, self.key, self.verb, self.fix, self.place]

    @classmethod
    def from_json(cls, fields: object) -> "UserCall | None":
        """Return the call, or None.

        Raises:
            WorldError: A field is missing or not a text.
        """
        match fields:
            case None | []:
                return None
            case [str(name), str(key), str(verb), str(fix), str(place)]:
                return cls(name, key, verb, fix, place)
        raise WorldError("a rank's call is corrupt: its fields are not those of a call; check who sent it")

    @classmethod
    def unpack(cls, data: bytes) -> "UserCall | None":
        """Return the call that `packed` describes; None for what is not one."""
        try:
            return cls(*json.loads(data.rstrip(b"\0")))
        except (ValueError, TypeError):
            return None


def are_different(one: UserCall | None, other: UserCall | None) -> bool:
    """Return whether two ranks make calls that do not belong together; a call that is not known fits all."""
    return one is not None and other is not None and one.key != other.key


def explain_mismatch(one: UserCall | None, other: UserCall | None) -> bool:
    """Return whether two calls say why ranks run different collectives: they are known, and not at the same place."""
    return (
        one is not None and other is not None and (one.key, one.name, one.place) != (other.key, other.name, other.place)
    )


def describe_calls(calls: dict[int, UserCall | None]) -> str:
    """Return one sentence, the same on all ranks, on two ranks that wait for each other in different calls."""
    # The call to make on all ranks comes first: not the one that every loop makes, which has no fix of its own.
    (rank, call), (peer, other) = sorted(calls.items(), key=lambda item: (not (item[1] and item[1].fix), item[0]))
    fix = call.fix if call and call.fix else "make the same calls on all ranks"
    return f"rank {rank} {_describe(call)} where rank {peer} {_describe(other)}; {fix}"


def describe_ended(rank: int, ended: int, call: UserCall | None) -> str:
    """Return one sentence on a rank that waits for one that has ended."""
    fix = call.fix if call and call.fix else "make the same calls on all ranks"
    where = f" in {call}" if call else ""
    return f"rank {ended} has ended, and rank {rank} waits for it{where}; {fix}"


def _describe(call: UserCall | None) -> str:
    return f"{call.verb} {call}" if call else "waits for it"


class Caller:
    """The user's thread of one rank, and the call that it is in; of nested calls the outermost is named."""

    def __init__(self) -> None:
        self.current: UserCall | None = None
        self.thread = 0
        """The thread that runs the user's script."""
        self.background: dict[int, tuple[UserCall, str]] = {}
        """By thread: calls that continue while the script runs, each with the group that it uses."""

    def enter(self, call: UserCall, *, overrides: bool = False) -> UserCall | None:
        """Enter a call, and return what `leave` needs; within another call only with `overrides`, at the same line."""
        outer = self.current
        if outer is None:
            self.thread = threading.get_ident()
            self.current = call if call.place else replace(call, place=find_place())
        elif overrides and outer.key != call.key:
            self.current = replace(call, place=outer.place)
        return outer

    def leave(self, outer: UserCall | None) -> None:
        """Leave a call."""
        self.current = outer

    @contextmanager
    def calling(self, call: UserCall, *, overrides: bool = False) -> Iterator[None]:
        """Be in a call, as `enter` has it."""
        outer = self.enter(call, overrides=overrides)
        try:
            yield
        finally:
            self.leave(outer)

    @contextmanager
    def in_background(self, call: UserCall, group: str) -> Iterator[None]:
        """Make a call on a thread of its own, over a group."""
        thread = threading.get_ident()
        self.background[thread] = call, group
        try:
            yield
        finally:
            del self.background[thread]

    def of_this_thread(self) -> UserCall | None:
        """Return the call on whose behalf the current thread works."""
        if self.background and (found := self.background.get(threading.get_ident())):
            return found[0]
        return self.current


def find_place() -> str:
    """Return the file and line of the user's script that led here, such as `train.py, line 41`."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if not file.startswith((_PACKAGE, "<")) and "site-packages" not in file and not _is_library(file):
            return f"{Path(file).name}, line {frame.f_lineno}"
        frame = frame.f_back
    return ""


def _is_library(file: str) -> bool:
    return file.startswith(_LIBRARY)


_LIBRARY = str(Path(threading.__file__).parent)
