"""By which transport and algorithm a collective can run, and which candidates are worth measuring."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from mimatrix.collectives.catalog import find
from mimatrix.collectives.schedule import Collective
from mimatrix.collectives.shares import Shares
from mimatrix.core.errors import UserError

Transport = Literal["windows", "send_recv", "c10d"]
"""Reads of peers' memory, messages over a c10d backend, or the backend's own collective."""
CACHED_BLOCK_BYTES = 256 << 10
"""A block of this size and its target stay in a core's second-level cache."""
_MIN_BLOCK_BYTES = 32 << 10


@dataclass(frozen=True, slots=True)
class AlgorithmChoice:
    """The transport, the algorithm, its number of segments, and the shares of its blocks if they are uneven."""

    transport: Transport = "windows"
    algorithm: str = "gdraa"
    segments: int = 1
    shares: Shares | None = None

    def __str__(self) -> str:
        if self.transport == "c10d":
            return "c10d"
        segments = f"/{self.segments}" if self.segments > 1 else ""
        return f"{self.transport} {self.algorithm}{segments}{' by bandwidth' if self.shares else ''}"

    @classmethod
    def parse(cls, text: str) -> "AlgorithmChoice":
        """Return the choice that `str` writes as `send_recv ring` or `windows gdraa/8`; shares are not read."""
        transport, _, rest = text.strip().partition(" ")
        algorithm, _, segments = rest.partition("/")
        if transport not in ("windows", "send_recv") or not (segments or "1").isdecimal():
            raise UserError(
                f'"{text}" does not name a transport and an algorithm; write for example "send_recv ring" or '
                '"windows gdraa/8"'
            )
        return cls(transport, find(algorithm).name, int(segments or 1))  # type: ignore[arg-type]


C10D = AlgorithmChoice("c10d", "c10d")
"""The collective of the c10d backend."""


def default_choice(collective: Collective, size: int, world_size: int, transport: Transport) -> AlgorithmChoice:
    """Return what to run without measurements: GDRAA, in segments whose blocks stay in cache."""
    is_segmented = collective is Collective.ALL_REDUCE and transport == "windows"
    segments = size // (world_size * CACHED_BLOCK_BYTES) if is_segmented else 1
    return AlgorithmChoice(transport, "gdraa", max(1, min(64, segments)))


def candidates(
    collective: Collective, size: int, world_size: int, transports: tuple[Transport, ...]
) -> Iterator[AlgorithmChoice]:
    """Yield what may be fastest for a message of `size` bytes, always with the c10d collective."""
    yield C10D
    is_all_reduce = collective is Collective.ALL_REDUCE
    is_one_host = "send_recv" not in transports
    if "windows" in transports:
        for segments in _segment_counts(size, world_size) if is_all_reduce and is_one_host else (1,):
            yield AlgorithmChoice("windows", "gdraa", segments)
    if "send_recv" in transports:
        yield AlgorithmChoice("send_recv", "gdraa")
        yield AlgorithmChoice("send_recv", "ring", 1)
        if is_all_reduce:
            yield AlgorithmChoice("send_recv", "halving_doubling")
            if size >= 1 << 20:
                yield AlgorithmChoice("send_recv", "gdraa", 4)
                yield AlgorithmChoice("send_recv", "gdraa", 16)


def _segment_counts(size: int, world_size: int) -> list[int]:
    """Return the numbers of segments whose blocks are large enough to be worth a synchronisation."""
    return [count for count in (1, 2, 8, 32, 64) if count == 1 or size // (count * world_size) >= _MIN_BLOCK_BYTES]
