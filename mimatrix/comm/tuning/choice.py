"""By which transport and algorithm a collective can run, and which candidates are worth measuring."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from mimatrix.collectives.catalog import find
from mimatrix.collectives.schedule import Collective
from mimatrix.collectives.shares import Shares
from mimatrix.comm.calls import Way
from mimatrix.core.errors import UserError

Transport = Literal["windows", "mixed", "send_recv", "c10d"]
"""Reads of peers' memory, such reads inside hosts and messages between them, messages over a c10d backend, or the
backend's own collective."""
CACHED_BLOCK_BYTES = 256 << 10
"""A block of this size and its target stay in a core's second-level cache."""
_MIN_BLOCK_BYTES = 32 << 10
_MIN_SEGMENTED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class AlgorithmChoice:
    """The transport, the algorithm, its number of segments, and the shares of its blocks if they are uneven."""

    transport: Transport = "windows"
    algorithm: str = "gdraa"
    segments: int = 1
    shares: Shares | None = None

    def __str__(self) -> str:
        if self.transport == "c10d":
            return "c10d" if self.algorithm == "c10d" else f"c10d {self.algorithm}"
        segments = f"/{self.segments}" if self.segments > 1 else ""
        return f"{self.transport} {self.algorithm}{segments}{' by bandwidth' if self.shares else ''}"

    @property
    def way(self) -> Way:
        """How a c10d backend moves shards by this choice."""
        return _WAYS.get(self.algorithm, "equal")

    @classmethod
    def parse(cls, text: str) -> "AlgorithmChoice":
        """Return the choice that `str` writes as `send_recv ring`, `windows gdraa/8`, `c10d padded`; no shares."""
        if native := {str(choice): choice for choice in (C10D, LISTS, PADDED)}.get(text.strip()):
            return native
        transport, _, rest = text.strip().partition(" ")
        algorithm, _, segments = rest.partition("/")
        if transport not in ("windows", "mixed", "send_recv") or not (segments or "1").isdecimal():
            raise UserError(
                f'"{text}" does not name a transport and an algorithm; write for example "send_recv ring" or '
                '"windows gdraa/8"'
            )
        return cls(transport, find(algorithm).name, int(segments or 1))  # type: ignore[arg-type]


C10D = AlgorithmChoice("c10d", "c10d")
"""The collective of the c10d backend."""
LISTS = AlgorithmChoice("c10d", "lists")
"""The backend's collective on a list of shards, which need not be of one size; NCCL groups a call for each shard."""
PADDED = AlgorithmChoice("c10d", "padded")
"""The backend's collective on shards that are padded to the size of the largest."""
_WAYS: dict[str, Way] = {LISTS.algorithm: "lists", PADDED.algorithm: "padded"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Carriers:
    """What can carry a message: found from the ranks, the message's device and its type."""

    windows: bool
    """Ranks read each other's memory."""
    send_recv: bool
    """The c10d backend sends messages between hosts."""
    mixed: bool = False
    """The ranks of a host read each other's memory, and the c10d backend sends messages between hosts."""
    native: bool
    """The c10d backend has the collective for this type."""
    native_lists: bool = False
    """It takes shards of different sizes, as NCCL does."""

    def has(self, transport: Transport) -> bool:
        """Return whether a transport can carry the message."""
        match transport:
            case "windows":
                return self.windows
            case "mixed":
                return self.mixed
            case "send_recv":
                return self.send_recv
            case "c10d":
                return self.native


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What is to be carried, as far as that decides what is worth trying."""

    collective: Collective
    bytes: int
    world_size: int
    is_uneven: bool = False
    """Whether ranks own shards of different sizes; only of reduce-scatters and all-gathers."""
    has_empty_shards: bool = False


def default_choice(collective: Collective, size: int, world_size: int, transport: Transport) -> AlgorithmChoice:
    """Return what to run without measurements: GDRAA, in segments whose blocks stay in cache."""
    is_segmented = collective is Collective.ALL_REDUCE and transport == "windows"
    segments = size // (world_size * CACHED_BLOCK_BYTES) if is_segmented else 1
    return AlgorithmChoice(transport, "gdraa", max(1, min(64, segments)))


def candidates(message: Message, carriers: Carriers) -> Iterator[AlgorithmChoice]:
    """Yield what may be fastest for a message among what can carry it."""
    yield from _native(message, carriers)
    is_all_reduce = message.collective is Collective.ALL_REDUCE
    if carriers.windows:
        is_segmented = is_all_reduce and not carriers.send_recv
        for segments in _segment_counts(message) if is_segmented else (1,):
            yield AlgorithmChoice("windows", "gdraa", segments)
    is_large = message.collective is not Collective.BROADCAST and message.bytes >= _MIN_SEGMENTED_BYTES
    if carriers.mixed and message.collective is not Collective.BROADCAST:
        for segments in (1, 4, 16) if is_large else (1,):
            yield AlgorithmChoice("mixed", "two_level", segments)
    if carriers.send_recv:
        yield AlgorithmChoice("send_recv", "gdraa")
        yield AlgorithmChoice("send_recv", "ring")
        if is_all_reduce:
            yield AlgorithmChoice("send_recv", "halving_doubling")
        if is_large:
            yield AlgorithmChoice("send_recv", "gdraa", 4)
            if is_all_reduce:
                yield AlgorithmChoice("send_recv", "gdraa", 16)


def _native(message: Message, carriers: Carriers) -> Iterator[AlgorithmChoice]:
    """Yield the collectives of the c10d backend."""
    if not carriers.native:
        return
    if not message.is_uneven:
        yield C10D
        return
    has_lists = carriers.native_lists and not message.has_empty_shards
    if has_lists:
        yield LISTS
    # On one host without NCCL, windows are several times as fast as Gloo is with shards of one size.
    if has_lists or not carriers.windows or carriers.send_recv:
        yield PADDED


def _segment_counts(message: Message) -> list[int]:
    """Return the numbers of segments whose blocks are large enough to be worth a synchronisation."""
    size, world_size = message.bytes, message.world_size
    return [count for count in (1, 2, 8, 32, 64) if count == 1 or size // (count * world_size) >= _MIN_BLOCK_BYTES]
