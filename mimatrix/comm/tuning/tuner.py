"""The tuner: measures a few plans at the first use of a size, and all ranks agree on the fastest.

Its table is kept in a file for the next job on the same machines, and says why: every candidate with its time.
"""

import hashlib
import json
import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

import torch

from mimatrix import __version__
from mimatrix.collectives.schedule import Collective
from mimatrix.comm.calls import CollectiveOp
from mimatrix.comm.execution.staging import STAGE_BYTES
from mimatrix.comm.memory.arena import Slot, slot_bytes
from mimatrix.comm.tuning.choice import AlgorithmChoice, candidates
from mimatrix.comm.tuning.choice import Transport as DataPath
from mimatrix.core.errors import UserError

if TYPE_CHECKING:
    from mimatrix.comm.group import Group

_ROUNDS = 5
_BUDGET_S = 20.0
"""Beyond this no further round is measured."""
_WORTH_ANOTHER_LOOK = 1.5
"""A plan that was this many times slower than the best so far is not measured again."""
_LARGEST = 256 << 20
"""Larger messages take the plan of this size: they behave alike, and measuring them would take long."""


@dataclass(frozen=True, slots=True)
class SizeClass:
    """Messages that are tuned together: of the same power of two of bytes, in the same place."""

    collective: Collective
    where: str
    """The kind of windows that fits them."""
    device: str
    placed: bool
    """In the arena, so that nothing is staged."""
    bits: int

    @classmethod
    def of(cls, collective: Collective, tensor: torch.Tensor, where: str, device: str, *, placed: bool) -> "SizeClass":
        """The class of a tensor, as measured on a kind of device."""
        size = min(tensor.numel() * tensor.element_size(), _LARGEST)
        return cls(collective, where, device, placed, max(6, size.bit_length()))

    @property
    def bytes(self) -> int:
        """The least message of the class."""
        return 1 << (self.bits - 1)

    def __str__(self) -> str:
        place = f"in the {self.where} arena" if self.placed else f"on {self.device}"
        return f"{self.collective.value} of 2^{self.bits - 1} bytes and more {place}"


class Tuner:
    """One for each group that has a native backend."""

    def __init__(self, group: "Group") -> None:
        self._group = group
        self._choices: dict[SizeClass, AlgorithmChoice] = {}
        self.table: dict[str, dict[str, float]] = {}
        """Seconds of every candidate, by size class: why a plan was chosen."""
        self._file = cache_folder() / f"{fingerprint(group)}.json"
        self._only = ""
        """The transport that MIMATRIX_TRANSPORT names: if there are candidates of it, only they are tried."""
        self._named: AlgorithmChoice | None = None
        """The choice that it names for all-reduces, as in `send_recv ring`."""
        self._load()

    def cached_choice(self, key: SizeClass) -> AlgorithmChoice | None:
        """The plan for such messages, if they were measured before, now or by an earlier job."""
        if key not in self._choices and str(key) in self.table:
            self._settle(key)
        return self._choices.get(key)

    def choose(self, key: SizeClass) -> AlgorithmChoice:
        """The fastest plan for such messages; measured now if it never was."""
        if self.cached_choice(key) is None:
            self.table[str(key)] = self._measured(key, list(self.candidates(key).values()))
            self._save()
            self._settle(key)
        return self._choices[key]

    def _settle(self, key: SizeClass) -> None:
        """Take the fastest, unless the candidates have changed since it was measured."""
        known, times = self.candidates(key), self.table[str(key)]
        if set(times) == set(known):
            self._choices[key] = known[min(times, key=lambda name: times[name])]

    def candidates(self, key: SizeClass) -> dict[str, AlgorithmChoice]:
        """What is, or would be, measured for such messages."""
        group, named = self._group, self._named
        if named and named.transport in group.transports and key.collective is Collective.ALL_REDUCE:
            return {str(named): named}
        # What passes through stages is cut to their size before any algorithm sees it.
        seen = key.bytes if key.placed or "send_recv" in group.transports else min(key.bytes, STAGE_BYTES[key.where])
        choices = list(candidates(key.collective, seen, group.world_size, group.transports))
        forecast = group.forecast
        if forecast and "send_recv" in group.transports and key.collective is Collective.ALL_REDUCE:
            uneven = [forecast.by_bandwidth(choice) for choice in choices if choice.segments > 1]
            choices += [choice for choice in (*uneven, AlgorithmChoice("send_recv", "hdrm")) if choice]
            possible = [
                choice for choice in choices if choice.transport == "c10d" or forecast.suits(choice, key.collective)
            ]
            choices = forecast.worth_trying(possible, key.collective, key.bytes)
        return {str(choice): choice for choice in choices if choice.transport == self._only} or {
            str(choice): choice for choice in choices
        }

    def _measured(self, key: SizeClass, choices: list[AlgorithmChoice]) -> dict[str, float]:
        """Interleaved, the least of a few rounds; a round counts as long as its slowest rank took."""
        native = self._group.native
        assert native
        count = key.bytes // 4 // self._group.world_size * self._group.world_size
        slot = self._slot(key.where, 4 * count) if key.placed else None
        tensor = slot.tensor(torch.float32, count) if slot else torch.empty(count, device=key.device)
        tensor.zero_()
        best, spent = dict.fromkeys(choices, float("inf")), 0.0
        for number in range(_ROUNDS + 1):
            near = min(best.values()) * _WORTH_ANOTHER_LOOK
            trying = [choice for choice in choices if number < 2 or best[choice] <= near]
            took = native.slowest(
                [self._timed(CollectiveOp(key.collective, tensor.dtype), tensor, choice) for choice in trying]
            )
            spent += sum(took)
            # The first round warms up, and counts only where there is no time for another.
            if number or spent > _BUDGET_S:
                best |= {choice: min(best[choice], seconds) for choice, seconds in zip(trying, took, strict=True)}
            if spent > _BUDGET_S:
                break
        if slot:
            slot.free()
        return {str(choice): took for choice, took in best.items()}

    def _slot(self, where: str, size: int) -> Slot | None:
        """A place in the arena where every rank has one left, or none on any: a full arena is measured from outside."""
        native, arena = self._group.native, self._group.endpoint.arenas[where]
        assert native
        full = native.slowest([float(arena.largest_free < slot_bytes(size))])
        return None if any(full) else arena.allocate(size)

    def _timed(self, kind: CollectiveOp, tensor: torch.Tensor, choice: AlgorithmChoice) -> float:
        started = time.perf_counter()
        self._group.perform(kind, tensor, choice)
        if tensor.is_cuda:
            torch.cuda.synchronize(tensor.device)
        return time.perf_counter() - started

    def _load(self) -> None:
        """Member 0 reads the file and tells the others, so that all know the same; also the path that it was told."""
        group = self._group
        key = f"mimatrix/tuned/{group.name}"
        if group.rank == 0:
            group.endpoint.store.set(key, json.dumps([_sound(self._file), os.environ.get("MIMATRIX_TRANSPORT", "")]))
        self.table, asked = json.loads(group.endpoint.store.get(key))
        self._named = AlgorithmChoice.parse(asked) if " " in asked else None
        self._only = self._named.transport if self._named else asked
        if self._only not in ("", *get_args(DataPath)):
            raise UserError(f'MIMATRIX_TRANSPORT is "{asked}"; use {", ".join(get_args(DataPath))}, or leave it out')

    def _save(self) -> None:
        if self._group.rank == 0:
            try:
                self._file.parent.mkdir(parents=True, exist_ok=True)
                partial = self._file.with_suffix(f".{os.getpid()}")
                partial.write_text(json.dumps(self.table, indent=1))
                partial.replace(self._file)
            except OSError:
                return  # a cache that cannot be written is measured anew


def fingerprint(group: "Group") -> str:
    """Alike for groups that are alike: machines, ranks on each, kinds of windows, versions."""
    hosts = [group.endpoint.places[rank].host for rank in group.members]
    layout = [hosts.index(host) for host in hosts]
    cluster = os.environ.get("MIMATRIX_CLUSTER", "")
    described = Path(cluster).read_text() if cluster and Path(cluster).is_file() else ""
    facts = [layout, group.transports, platform.machine(), os.cpu_count(), torch.__version__, __version__, described]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def cache_folder() -> Path:
    """Where tables stay from run to run."""
    base = os.environ.get("MIMATRIX_CACHE") or os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "mimatrix" / "tuner"


def _sound(file: Path) -> dict[str, dict[str, float]]:
    """What a table says that can be believed: a file may be cut off, or somebody else's."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return {key: times for key, times in found.items() if _are_times(times)} if isinstance(found, dict) else {}


def _are_times(times: object) -> bool:
    return isinstance(times, dict) and all(isinstance(each, int | float) for each in times.values())
