"""The tuner: at the first use of a size it measures a few candidates, and all ranks agree on the fastest.

Its table is cached in a file for the next job on the same machines, and holds the time of every candidate.
"""

import hashlib
import itertools
import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, get_args

import torch

from mimatrix import __version__
from mimatrix.cluster import write_cluster
from mimatrix.collectives.schedule import Collective
from mimatrix.collectives.shares import Shares
from mimatrix.comm.c10d import C10dBackend
from mimatrix.comm.calls import SHARDED, CollectiveOp
from mimatrix.comm.endpoint import Endpoint
from mimatrix.comm.execution.staging import CHUNK_BYTES
from mimatrix.comm.memory.arena import Slot, slot_bytes
from mimatrix.comm.tuning.choice import AlgorithmChoice, Carriers, Message, Transport, candidates
from mimatrix.comm.tuning.forecast import Forecast
from mimatrix.core import environment
from mimatrix.core.cache import cache_folder
from mimatrix.core.errors import UserError
from mimatrix.core.files import write_atomic

Table = dict[str, dict[str, float]]
"""Seconds of every candidate, by size class."""
_VERSION = 2
"""Of the cache file."""
_ROUNDS = 5
_BUDGET_S = 20.0
"""No further round starts after this much measuring."""
_RETRY_RATIO = 1.5
"""A choice that was this many times slower than the best so far is not measured again."""
_MAX_BYTES = 256 << 20
"""Larger messages use the choice of this size: they behave alike, and measuring them would take long."""


class TunedGroup(Protocol):
    """What the tuner needs of the ranks that it measures."""

    rank: int
    world_size: int
    members: tuple[int, ...]
    endpoint: Endpoint
    forecast: Forecast | None
    cpu_backend: C10dBackend | None

    @property
    def transports(self) -> tuple[Transport, ...]:
        """The transports that can carry data."""
        ...

    def carriers(self, collective: Collective, device: str, dtype: torch.dtype) -> Carriers:
        """Return what can carry a message that lies on `device` on every rank."""
        ...

    def execute(self, op: CollectiveOp, tensor: torch.Tensor, choice: AlgorithmChoice) -> None:
        """Run a collective in place on a tensor."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeClass:
    """Messages that are tuned together: of the same power of two of bytes, in the same memory, cut about alike."""

    collective: Collective
    window_kind: str
    device: str
    is_placed: bool
    """Whether the tensor is in the arena, so that it is not staged."""
    bits: int
    carriers: Carriers
    """What can carry it; the same for all types but a few."""
    imbalance: float = 0.0
    """How many times as large as an equal one the largest shard is, in halves; 0 if all are of one size."""
    has_empty_shards: bool = False

    @classmethod
    def of(
        cls,
        collective: Collective,
        tensor: torch.Tensor,
        window_kind: str,
        device: str,
        carriers: Carriers,
        *,
        is_placed: bool,
        counts: Sequence[int],
    ) -> "SizeClass":
        """Return the class of a tensor that is measured on a kind of device, of which rank r owns `counts[r]`."""
        size = min(tensor.nbytes, _MAX_BYTES)
        is_uneven = collective in SHARDED and len(set(counts)) > 1
        return cls(
            collective=collective,
            window_kind=window_kind,
            device=device,
            is_placed=is_placed,
            bits=max(6, size.bit_length()),
            carriers=carriers,
            imbalance=max(1.0, round(2 * max(counts) * len(counts) / sum(counts)) / 2) if is_uneven else 0.0,
            has_empty_shards=is_uneven and min(counts) == 0,
        )

    @property
    def bytes(self) -> int:
        """The size of the smallest message of the class."""
        return 1 << (self.bits - 1)

    def message(self, size: int, world_size: int) -> Message:
        """Return what is asked of an algorithm that sees `size` bytes at a time."""
        return Message(
            collective=self.collective,
            bytes=size,
            world_size=world_size,
            is_uneven=self.imbalance > 0,
            has_empty_shards=self.has_empty_shards,
        )

    def __str__(self) -> str:
        place = f"in the {self.window_kind} arena" if self.is_placed else f"on {self.device}"
        shards = f", largest shard {self.imbalance:g}x" if self.imbalance else ""
        empty = ", some empty" if self.has_empty_shards else ""
        foreign = "" if self.carriers.native else ", of a type that c10d does not reduce"
        return f"{self.collective.value} of 2^{self.bits - 1} bytes and more {place}{shards}{empty}{foreign}"


class Tuner:
    """The choices of one group that has a c10d backend.

    `requested` is what MIMATRIX_TRANSPORT names: a transport, whose candidates alone are tried if there are any, or a
    transport and an algorithm for all-reduces, as in `send_recv ring`.
    """

    def __init__(self, group: TunedGroup, table: Table, file: Path, requested: str) -> None:
        self._group, self._file = group, file
        self._choices: dict[SizeClass, AlgorithmChoice] = {}
        self.table = table
        """Seconds of every candidate by size class: why a choice was made."""
        self._gpu_windows: bool | None = None
        self._fixed = AlgorithmChoice.parse(requested) if " " in requested else None
        self._only = self._fixed.transport if self._fixed else requested
        if self._only not in ("", *get_args(Transport)):
            raise UserError(
                f'{environment.TRANSPORT.name} is "{requested}"; use {", ".join(get_args(Transport))}, or leave it out'
            )

    @classmethod
    def load(cls, group: TunedGroup, name: str) -> "Tuner":
        """Return a tuner with the cached table and the environment of member 0, the same on all members."""
        key, file = f"mimatrix/tuned/{name}", cache_folder("tuner") / f"{fingerprint(group)}.json"
        if group.rank == 0:
            group.endpoint.store.set(key, json.dumps([_read_table(file), environment.TRANSPORT.get()]))
        table, requested = json.loads(group.endpoint.store.get(key))
        return cls(group, table, file, requested)

    @property
    def used_table(self) -> Table:
        """What was measured for the classes that this group has used, now or by an earlier job."""
        return {str(key): self.table[str(key)] for key in self._choices if str(key) in self.table}

    def cached_choice(self, key: SizeClass) -> AlgorithmChoice | None:
        """Return the choice for a class that was measured before, now or by an earlier job; otherwise None."""
        if key not in self._choices:
            if str(key) in self.table:
                self._select(key)
            elif len(only := list(self.candidates(key).values())) == 1:
                self._choices[key] = only[0]  # nothing to compare it with
        return self._choices.get(key)

    def choose(self, key: SizeClass, shares: Shares | None = None) -> AlgorithmChoice:
        """Return the fastest choice for a class; measure it if it was not measured before, with these shares."""
        if self.cached_choice(key) is None:
            self.table[str(key)] = self._measure(key, list(self.candidates(key).values()), shares)
            self._save()
            self._select(key)
        return self._choices[key]

    def candidates(self, key: SizeClass) -> dict[str, AlgorithmChoice]:
        """Return what is, or would be, measured for a class."""
        group, fixed = self._group, self._fixed
        if fixed and key.carriers.has(fixed.transport) and key.collective is Collective.ALL_REDUCE:
            return {str(fixed): fixed}
        # Staged tensors are cut into chunks before any algorithm sees them.
        is_whole = key.is_placed or key.carriers.send_recv
        size = key.bytes if is_whole else min(key.bytes, CHUNK_BYTES[key.window_kind])
        choices = list(candidates(key.message(size, group.world_size), key.carriers))
        forecast = group.forecast
        if forecast and key.carriers.send_recv and key.collective is Collective.ALL_REDUCE:
            uneven = [
                forecast.by_bandwidth(choice)
                for choice in choices
                if choice.segments > 1 and choice.transport == "send_recv"
            ]
            choices += [choice for choice in (*uneven, AlgorithmChoice("send_recv", "hdrm")) if choice]
            possible = [
                choice for choice in choices if choice.transport == "c10d" or forecast.suits(choice, key.collective)
            ]
            choices = forecast.worth_trying(possible, key.collective, key.bytes)
        requested = [choice for choice in choices if choice.transport == self._only]
        return {str(choice): choice for choice in requested or choices}

    def restrict_gpus(self, *, windows: bool | None) -> None:
        """Have windows carry all tensors of GPUs from now on, or have them carry none; None: whatever is fastest.

        Windows have the host wait for other ranks, and NCCL a stream; a program whose ranks wait for each other in both
        ways, in orders that differ, would never end.
        """
        self._gpu_windows = windows
        self._choices.clear()

    def fastest_s(self, key: SizeClass, *, windows: bool) -> float:
        """Return the shortest time that was measured for a class over windows, or without; infinite if none was."""
        times = self.table.get(str(key), {})
        allowed = [name for name, choice in self.candidates(key).items() if (choice.transport == "windows") == windows]
        return min((times[name] for name in allowed if name in times), default=float("inf"))

    def _select(self, key: SizeClass) -> None:
        """Take the fastest, unless the candidates have changed since they were measured."""
        choices, times = self.candidates(key), self.table[str(key)]
        if set(times) == set(choices):
            allowed = [name for name in choices if self._is_allowed(key, choices[name])] or list(choices)
            self._choices[key] = choices[min(allowed, key=lambda name: times[name])]

    def _is_allowed(self, key: SizeClass, choice: AlgorithmChoice) -> bool:
        return key.device != "cuda" or self._gpu_windows in (None, choice.transport == "windows")

    def _measure(
        self, key: SizeClass, choices: list[AlgorithmChoice], shares: Shares | None = None
    ) -> dict[str, float]:
        """Return the shortest of a few interleaved rounds; a round counts as long as its slowest rank took."""
        backend = self._group.cpu_backend
        assert backend
        count = _measured_count(key, shares or Shares.equal(self._group.world_size))
        slot = self._allocate(key.window_kind, 4 * count) if key.is_placed else None
        tensor = slot.tensor(torch.float32, count) if slot else torch.empty(count, device=key.device)
        tensor.zero_()
        op = CollectiveOp(key.collective, tensor.dtype, shares=shares if key.imbalance else None)
        best, spent_s = dict.fromkeys(choices, float("inf")), 0.0
        for number in range(_ROUNDS + 1):
            limit_s = min(best.values()) * _RETRY_RATIO
            tried = [choice for choice in choices if number < 2 or best[choice] <= limit_s]
            took_s = backend.max_over_ranks([self._time(op, tensor, choice) for choice in tried])
            spent_s += sum(took_s)
            # The first round warms up, and counts only if there is no time for another.
            if number or spent_s > _BUDGET_S:
                best |= {choice: min(best[choice], seconds) for choice, seconds in zip(tried, took_s, strict=True)}
            if spent_s > _BUDGET_S:
                break
        if slot:
            slot.free()
        return {str(choice): seconds for choice, seconds in best.items()}

    def _allocate(self, window_kind: str, size: int) -> Slot | None:
        """Return a slot if the arenas of all ranks have room, otherwise None on all ranks: then it is staged."""
        backend, arena = self._group.cpu_backend, self._group.endpoint.arenas[window_kind]
        assert backend
        is_full = backend.max_over_ranks([float(arena.largest_free_bytes < slot_bytes(size))])
        return None if any(is_full) else arena.allocate(size)

    def _time(self, op: CollectiveOp, tensor: torch.Tensor, choice: AlgorithmChoice) -> float:
        assert self._group.cpu_backend
        # A rank that owns little may have left the measurement before long ago; its wait is not this candidate's.
        self._group.cpu_backend.max_over_ranks([0.0])
        started = time.perf_counter()
        self._group.execute(op, tensor, choice)
        if tensor.is_cuda:
            # Not the device: on another stream a collective of another group may wait for ranks that measure first.
            torch.cuda.current_stream(tensor.device).synchronize()
        return time.perf_counter() - started

    def _save(self) -> None:
        if self._group.rank == 0:
            try:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(self._file, json.dumps({"version": _VERSION, "table": self.table}, indent=1))
            except OSError:
                return  # without a cache the next job measures again


def _measured_count(key: SizeClass, shares: Shares) -> int:
    """Return how many float32 to measure: about as many bytes as the smallest message has, cut as its class says.

    The elements of a message may be smaller than float32. So a few more bytes may be needed until no shard is empty, or
    until shards that are equal but for what does not divide evenly are not.
    """
    count = key.bytes // 4 // len(shares) * len(shares)
    if not key.imbalance:
        return count
    larger = (((count + 1) << doublings) | 1 for doublings in itertools.count())
    return next(length for length in itertools.chain([count], larger) if _is_cut_alike(key, shares.cut(length)))


def _is_cut_alike(key: SizeClass, counts: Sequence[int]) -> bool:
    """Whether shards are uneven, and are empty only if those of the class may be."""
    return len(set(counts)) > 1 and (key.has_empty_shards or min(counts) > 0)


def fingerprint(group: TunedGroup) -> str:
    """Return a hash of the machines, the ranks on each with their devices and NICs, the transports and the versions."""
    hosts = [group.endpoint.locations[rank].host for rank in group.members]
    layout = [hosts.index(host) for host in hosts]
    description = write_cluster(group.forecast.known.cluster) if group.forecast else ""
    places = [group.endpoint.locations[rank].facts for rank in group.members]
    facts = [layout, places, group.transports, platform.machine(), os.cpu_count(), torch.__version__, __version__]
    facts.append(description)
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def _read_table(file: Path) -> Table:
    """Return the valid entries of a cached table: a file may be cut off, or of another program or version."""
    try:
        content: Any = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    match content:
        case {"version": version, "table": dict(table)} if version == _VERSION:
            return {key: times for key, times in table.items() if _are_times(times)}
    return {}


def _are_times(times: object) -> bool:
    return isinstance(times, Mapping) and all(isinstance(seconds, int | float) for seconds in times.values())
