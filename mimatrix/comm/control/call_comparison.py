"""Whether ranks made the same calls, found by comparing what they report from time to time. No sockets, and no clock.

A rank's digest after a call covers all its calls so far. Ranks with the same digest after the same number of calls made
the same calls, so one entry for each number stands for all ranks that have agreed with it, and memory does not grow
with the number of ranks.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from mimatrix.comm.control.user_calls import UserCall, are_different, describe_calls, explain_mismatch
from mimatrix.comm.disagreement import describe_disagreement
from mimatrix.core.errors import WorldError

KEPT_CALLS = 64
"""How many calls a rank remembers, and the most that one report has."""
_MAX_GROUPS = 1024
_MAX_ENTRIES = 4096
"""Per group: more than 16 regular reports and a few full ones, so that a rank may be far ahead of the others."""
_MAX_TEXT = 400
_MAX_NUMBER = 1 << 53


@dataclass(frozen=True, slots=True)
class CallEntry:
    """One call of a group, and the digests of all calls before it and up to it."""

    number: int
    before: int
    digest: int
    description: str
    user_call: UserCall | None = None

    def to_json(self) -> list[Any]:
        """Return what `from_json` reads, apart from the digest before, which the entry before has."""
        call = [text[:_MAX_TEXT] for text in self.user_call.to_json()] if self.user_call else None
        return [self.number, self.digest, self.description[:_MAX_TEXT], call]

    @classmethod
    def from_json(cls, fields: object, before: int) -> "CallEntry":
        """Return the entry; `before` is the digest of all calls before it.

        Raises:
            WorldError: A field is missing or of the wrong type.
        """
        match fields:
            case [number, digest, str(text), call] if _is_number(number, 1, _MAX_NUMBER) and _is_digest(digest):
                user_call = UserCall.from_json(call)
                if max(map(len, [text, *(user_call.to_json() if user_call else ())])) > _MAX_TEXT:
                    raise _corrupt("a text is too long")
                # Ranks send the same few descriptions again and again.
                return cls(number, before, digest, sys.intern(text), user_call)
        raise _corrupt("an entry is not a number, a digest, a description and a call")


@dataclass(frozen=True, slots=True)
class CallReport:
    """The last calls of one rank in a group, in their order and without gaps."""

    group: str
    members: tuple[int, ...]
    recent: tuple[CallEntry, ...]

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` reads."""
        return {
            "group": self.group,
            "members": self.members,
            "number": self.recent[-1].number,
            "digest": self.recent[-1].digest,
            "before": self.recent[0].before,
            "recent": [entry.to_json() for entry in self.recent],
        }

    @classmethod
    def from_json(cls, body: dict[str, Any], rank: int) -> "CallReport":
        """Return the report that `rank` sent.

        Raises:
            WorldError: It is not a report, or not of a group with this rank.
        """
        match body:
            case {"group": str(group), "members": list(members), "before": before, "recent": [_, *_] as recent} if (
                len(group) <= _MAX_TEXT and len(recent) <= KEPT_CALLS and _is_digest(before)
            ):
                entries = tuple(_read_entries(recent, before))
                if (body.get("number"), body.get("digest")) != (entries[-1].number, entries[-1].digest):
                    raise _corrupt("its last entry has another number or digest")
                return cls(group, _read_members(members, rank), entries)
        raise _corrupt("its fields are not those of a report")


@dataclass(frozen=True, slots=True)
class CallDifference:
    """Two ranks that made different calls: their entries at the lowest number at which a difference is known."""

    calls: tuple[tuple[int, CallEntry], tuple[int, CallEntry]]
    """Each rank and its entry, the lower rank first."""

    @property
    def is_first(self) -> bool:
        """Whether these are the first calls that differ; otherwise those are older than what the ranks reported."""
        (_, one), (_, other) = self.calls
        return one.before == other.before

    @property
    def ranks(self) -> list[int]:
        """The two ranks."""
        return [rank for rank, _ in self.calls]

    @property
    def is_users(self) -> bool:
        """Whether different calls of the user's script are the reason."""
        (_, one), (_, other) = self.calls
        explained = one.digest != other.digest and explain_mismatch(one.user_call, other.user_call)
        return self.is_first and (explained or are_different(one.user_call, other.user_call))

    def describe(self, names: dict[int, str]) -> str:
        """Return one sentence; `names` has `rank 3 on hostname` for the two ranks."""
        if self.is_users:
            return describe_calls({rank: entry.user_call for rank, entry in self.calls})
        (rank, one), (peer, other) = self.calls
        if not self.is_first:
            who = f"{names[rank]} and {names[peer]}"
            return describe_disagreement(
                f"before call number {one.number}", f"{who} made different calls, which their logs do not have any more"
            )
        asked = "the same with other shares" if one.description == other.description else other.description
        return describe_disagreement(
            f"at call number {one.number}", f"{names[rank]} asks for {one.description}, {names[peer]} for {asked}"
        )


@dataclass(slots=True)
class GroupCalls:
    """The calls of one group on which all ranks that reported them agree."""

    members: tuple[int, ...]
    entries: dict[int, tuple[int, CallEntry]] = field(default_factory=dict)
    """By number: the entry, and the rank that reported it first."""
    reported: dict[int, int] = field(default_factory=dict)
    """The highest number that each rank has reported."""
    is_different: bool = False

    def take(self, rank: int, report: CallReport) -> CallDifference | None:
        """Compare a report with what other ranks reported, and keep it; return the first difference, but once."""
        if self.is_different:
            return None
        if difference := self._find_difference(rank, report):
            self.is_different = True
            self.entries.clear()
            return difference
        for entry in report.recent:
            known = self.entries.get(entry.number)
            # An unknown call of the user fits all, so a known one is better to compare with.
            if known is None or (known[1].user_call is None and entry.user_call is not None):
                self.entries[entry.number] = rank, entry
        self.reported[rank] = max(report.recent[-1].number, self.reported.get(rank, 0))
        self._forget()
        return None

    def _find_difference(self, rank: int, report: CallReport) -> CallDifference | None:
        for entry in report.recent:
            peer, other = self.entries.get(entry.number, (rank, entry))
            if peer == rank and entry.digest != other.digest:
                raise _corrupt("it contradicts the sender's own earlier report; use a group's name once")
            if entry.digest != other.digest or are_different(entry.user_call, other.user_call):
                one, two = sorted([(rank, entry), (peer, other)], key=lambda item: item[0])
                return CallDifference((one, two))
        return None

    def _forget(self) -> None:
        """Drop what all members have agreed on, and the oldest entries if there are too many."""
        agreed = min(self.reported.values()) if len(self.reported) == len(self.members) else 0
        kept = sorted(number for number in self.entries if number >= agreed)[-_MAX_ENTRIES:]
        if len(kept) < len(self.entries):
            self.entries = {number: self.entries[number] for number in kept}


@dataclass(slots=True)
class CallComparison:
    """What all groups have reported, of the groups that reported last."""

    groups: dict[tuple[str, tuple[int, ...]], GroupCalls] = field(default_factory=dict)

    def take(self, rank: int, report: CallReport) -> CallDifference | None:
        """Take a rank's report and return how it differs from other ranks' calls; once for each group."""
        key = report.group, report.members
        group = self.groups.pop(key, None) or GroupCalls(report.members)
        self.groups[key] = group
        if len(self.groups) > _MAX_GROUPS:
            del self.groups[next(iter(self.groups))]
        return group.take(rank, report)


def _read_entries(recent: list[object], before: int) -> Iterator[CallEntry]:
    number = None
    for fields in recent:
        entry = CallEntry.from_json(fields, before)
        if number is not None and entry.number != number + 1:
            raise _corrupt("its entries are not in order")
        number, before = entry.number, entry.digest
        yield entry


def _read_members(members: list[object], rank: int) -> tuple[int, ...]:
    ranks = tuple(member for member in members if _is_number(member, 0, 1 << 31))
    if len(ranks) != len(members) or len(set(ranks)) != len(ranks) or rank not in ranks:
        raise _corrupt("its members are not ranks, or the sender is not one of them")
    return ranks


def _is_digest(value: object) -> TypeGuard[int]:
    return _is_number(value, 0, 1 << 32)


def _is_number(value: object, least: int, limit: int) -> TypeGuard[int]:
    return type(value) is int and least <= value < limit


def _corrupt(reason: str) -> WorldError:
    return WorldError(f"a report of calls is corrupt: {reason}; check who sent it")
