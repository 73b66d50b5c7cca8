"""A plan: who does how much of every step, what that should take, and why."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from mimatrix.collectives.shares import Shares
from mimatrix.core.errors import UserError
from mimatrix.planner.memory_fit import listed
from mimatrix.planner.model.json_fields import Fields
from mimatrix.planner.model.profile import STAGES
from mimatrix.planner.model.split import Split

VERSION = 1
_BRIEFEST_S = 1e-12
"""No step takes less."""
_LISTED = 8


@dataclass(frozen=True, slots=True)
class Part:
    """What one rank does in a step."""

    name: str
    """Of the rank, for people: its device, or its place in the cluster."""
    busy_s: float
    """Computing: its micro-batches and its part of the optimizer's step."""
    idle_s: float
    """Waiting for slower ranks."""
    memory_bytes: int
    """At its peak."""
    room_bytes: int
    device: str = ""
    """As the machine calls it, where it is known."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A device that the job is better off without."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class Plan:
    """How a job trains on its devices. `parts`, `split` and `shares` have an entry for each rank that takes part."""

    stage: int
    split: Split
    shares: Shares
    parts: tuple[Part, ...]
    step_s: float
    """Predicted."""
    communication_s: float
    """Of `step_s`: moving data while nobody computes."""
    reasons: tuple[str, ...]
    """Why so, for a person."""
    left_out: tuple[LeftOut, ...] = ()
    within: float = 0.0
    """How far above the optimum of its own model it can be, as a part; 0: it is the optimum."""
    model: str = ""
    """The fingerprint of the model that it is for."""
    version: int = 0
    """Rises with every change while training."""

    @property
    def global_batch(self) -> int:
        """Samples of a step."""
        return self.split.total

    @property
    def samples_per_s(self) -> float:
        """Predicted."""
        return self.global_batch / self.step_s

    @property
    def communication_known(self) -> bool:
        """Whether `communication_s` says anything: several ranks for whom it is 0 were never measured together."""
        return len(self.parts) < 2 or self.communication_s > 0

    @property
    def idle(self) -> float:
        """The part of all ranks' time that is spent waiting for slower ones."""
        return sum(part.idle_s for part in self.parts) / (len(self.parts) * self.step_s)

    def following(self, version: int) -> "Plan":
        """The same with a version."""
        return replace(self, version=version)

    def to_json(self) -> dict[str, Any]:
        """As plain values, for `from_json`."""
        return {
            **{
                name: getattr(self, name)
                for name in ("stage", "step_s", "communication_s", "within", "model", "version")
            },
            "mimatrix_plan": VERSION,
            "global_batch": self.global_batch,
            "samples_per_s": self.samples_per_s,
            "communication_known": self.communication_known,
            "idle": self.idle,
            "micro": self.split.to_json(),
            "shares": list(self.shares.fractions),
            "ranks": [asdict(part) for part in self.parts],
            "reasons": list(self.reasons),
            "left_out": [asdict(each) for each in self.left_out],
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Plan":
        """What `to_json` gave; a ValueError names what cannot be."""
        return cls._of(Fields.of(fields, "it"))

    @classmethod
    def from_text(cls, text: str, name: str = "the plan") -> "Plan":
        """A plan from a file; a sentence for anything else."""
        try:
            fields = Fields.read(text)
            version = fields.take("mimatrix_plan")
        except ValueError:
            raise UserError(f"{name} is no plan; make one with `mimatrix plan --output plan.json`") from None
        if version != VERSION:
            raise UserError(
                f"{name} has version {version} and this is {VERSION}; make it again: mimatrix plan --output plan.json"
            )
        try:
            return cls._of(fields)
        except ValueError as error:
            fix = "correct it, or make it again: mimatrix plan --output plan.json"
            raise UserError(f"{name} is damaged ({error}); {fix}") from None

    @classmethod
    def _of(cls, fields: Fields) -> "Plan":
        parts = tuple(_part(each) for each in fields.objects("ranks"))
        if not parts:
            raise ValueError("ranks is empty")
        return cls(
            fields.whole("stage", most=STAGES[-1]),
            _split(fields, len(parts)),
            _shares(fields, len(parts)),
            parts,
            fields.figure("step_s", least=_BRIEFEST_S),
            fields.figure("communication_s"),
            fields.texts("reasons"),
            tuple(LeftOut(each.text("name"), each.text("reason")) for each in fields.objects("left_out")),
            fields.figure("within"),
            fields.text("model"),
            fields.whole("version"),
        )


def misfit(plan: Plan, devices: Sequence[str]) -> str:
    """Why ranks with these devices cannot follow the plan, with the fix; empty if they may."""
    ranks, here = plan.split.ranks, len(devices)
    if ranks != here:
        return _other_number(plan, here)
    if len(plan.shares) != ranks:
        return f"has {len(plan.shares)} shares for {ranks} ranks; give one for each rank"
    meant = [part.device or part.name for part in plan.parts]
    # Only the same names in another order are surely the same devices: who describes a cluster may spell them freely.
    if sorted(meant) != sorted(devices) or meant == list(devices):
        return ""
    rank = next(rank for rank in range(ranks) if meant[rank] != devices[rank])
    return (
        f"has {meant[rank]} as rank {rank}, which is {devices[rank]} here; start the ranks in the plan's order "
        f"({listed(meant, _LISTED)}), or make another with mimatrix plan"
    )


def _other_number(plan: Plan, here: int) -> str:
    ranks = plan.split.ranks
    count = f"{ranks} rank{'s' if ranks > 1 else ''}"
    if not plan.left_out or ranks + len(plan.left_out) != here:
        return f"is for {count} and there are {here}; make another with mimatrix plan"
    left = f"leaves out {listed([each.name for each in plan.left_out], _LISTED)}"
    stay = listed([part.name for part in plan.parts], _LISTED)
    return (
        f"is for {count} and there are {here}, since it {left}; start only {stay} (-n {ranks}), or plan with all: "
        f"mimatrix plan --keep-all"
    )


def _part(fields: Fields) -> Part:
    return Part(
        fields.text("name"),
        fields.figure("busy_s"),
        fields.figure("idle_s"),
        fields.size("memory_bytes"),
        fields.size("room_bytes"),
        fields.text("device") if "device" in fields.values else "",
    )


def _split(fields: Fields, ranks: int) -> Split:
    micro = fields.wholes("micro", least=1)
    if len(micro) != ranks:
        raise ValueError(f"micro has {len(micro)} entries and ranks has {ranks}")
    total, said = sum(map(sum, micro)), fields.whole("global_batch", least=1)
    if said != total:
        raise ValueError(f"global_batch is {said} and micro has {total} samples")
    return Split(micro)


def _shares(fields: Fields, ranks: int) -> Shares:
    fractions = fields.figures("shares", ranks)
    try:
        return Shares(fractions)
    except UserError:
        raise ValueError(f"shares sum to {math.fsum(fractions):.6g}, wanted 1") from None
