"""A plan: how much of every step each rank does, how long that should take, and why."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from mimatrix.collectives.shares import Shares
from mimatrix.core.errors import UserError
from mimatrix.core.text import count_of, join_names
from mimatrix.planner.model.json_fields import Fields
from mimatrix.planner.model.profile import STAGES
from mimatrix.planner.model.split import Split

VERSION = 2
"""Of the file: 2 has `parts` and `split`, which were `ranks` and `micro`."""
_BRIEFEST_S = 1e-12
"""No step takes less."""
_MAX_NAMES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPlan:
    """What one rank does in a step."""

    name: str
    """The device of the rank for people, or its place in the cluster."""
    busy_s: float
    """Computing: its micro-batches and its part of the optimizer's step."""
    idle_s: float
    """Waiting for slower ranks."""
    memory_bytes: int
    """At its peak."""
    room_bytes: int
    device: str = ""
    """The name that its machine gives the device, if it is known."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A device that the job is faster without."""

    name: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How a job trains on its devices. `parts`, `split` and `shares` have an entry for each rank that takes part."""

    stage: int
    split: Split
    shares: Shares
    parts: tuple[RankPlan, ...]
    step_s: float
    """Predicted."""
    communication_s: float
    """The part of `step_s` in which data moves and no rank computes."""
    reasons: tuple[str, ...]
    """Why the plan is as it is, for people."""
    left_out: tuple[LeftOut, ...] = ()
    within: float = 0.0
    """How far above the optimum of its cost model it can be, as a part; 0: it is the optimum."""
    model: str = ""
    """The fingerprint of the model that it is for."""
    version: int = 0
    """Increases with every change during training."""

    @property
    def global_batch(self) -> int:
        """Samples per step."""
        return self.split.total

    @property
    def samples_per_s(self) -> float:
        """Predicted samples per second."""
        return self.global_batch / self.step_s

    @property
    def communication_known(self) -> bool:
        """Whether `communication_s` means anything: if it is 0 for several ranks, they were never measured together."""
        return len(self.parts) < 2 or self.communication_s > 0

    @property
    def idle(self) -> float:
        """The part of all ranks' time that is spent waiting for slower ones."""
        return sum(part.idle_s for part in self.parts) / (len(self.parts) * self.step_s)

    def with_version(self, version: int) -> "Plan":
        """Return the same plan with a version."""
        return replace(self, version=version)

    def to_json(self) -> dict[str, Any]:
        """Return plain values for `from_json`."""
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
            "split": self.split.to_json(),
            "shares": list(self.shares.fractions),
            "parts": [asdict(part) for part in self.parts],
            "reasons": list(self.reasons),
            "left_out": [asdict(each) for each in self.left_out],
        }

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Plan":
        """Return the plan that `to_json` was called on; a ValueError names an invalid field."""
        return cls._of(Fields.of(fields, "it"))

    @classmethod
    def from_text(cls, text: str, name: str = "the plan") -> "Plan":
        """Return the plan in a file.

        Args:
            text: The content of the file.
            name: What errors call the file.

        Raises:
            UserError: The file is not a plan, is of another version, or is damaged.
        """
        try:
            fields = Fields.read(text)
            version = fields.take("mimatrix_plan")
        except ValueError:
            raise UserError(f"{name} is not a plan; make one with `mimatrix plan --output plan.json`") from None
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
        parts = tuple(_rank_plan(each) for each in fields.objects("parts"))
        if not parts:
            raise ValueError("parts is empty")
        return cls(
            stage=fields.whole("stage", most=STAGES[-1]),
            split=_split(fields, len(parts)),
            shares=_shares(fields, len(parts)),
            parts=parts,
            step_s=fields.figure("step_s", least=_BRIEFEST_S),
            communication_s=fields.figure("communication_s"),
            reasons=fields.texts("reasons"),
            left_out=tuple(LeftOut(each.text("name"), each.text("reason")) for each in fields.objects("left_out")),
            within=fields.figure("within"),
            model=fields.text("model"),
            version=fields.whole("version"),
        )


def explain_misfit(plan: Plan, devices: Sequence[str]) -> str:
    """Return why ranks with these devices cannot follow the plan, with the fix; empty if they can."""
    ranks, here = plan.split.ranks, len(devices)
    if ranks != here:
        return _explain_count(plan, here)
    if len(plan.shares) != ranks:
        return f"has {len(plan.shares)} shares for {ranks} ranks; give one for each rank"
    planned = [part.device or part.name for part in plan.parts]
    # Only the same names in another order are surely the same devices: cluster files may spell them freely.
    if sorted(planned) != sorted(devices) or planned == list(devices):
        return ""
    rank = next(rank for rank in range(ranks) if planned[rank] != devices[rank])
    return (
        f"has {planned[rank]} as rank {rank}, which is {devices[rank]} here; start the ranks in the plan's order "
        f"({join_names(planned, _MAX_NAMES)}), or make another with mimatrix plan"
    )


def _explain_count(plan: Plan, here: int) -> str:
    ranks = plan.split.ranks
    count = count_of(ranks, "rank")
    if not plan.left_out or ranks + len(plan.left_out) != here:
        return f"is for {count} and there are {here}; make another with mimatrix plan"
    left = f"leaves out {join_names([each.name for each in plan.left_out], _MAX_NAMES)}"
    stay = join_names([part.name for part in plan.parts], _MAX_NAMES)
    return (
        f"is for {count} and there are {here}, since it {left}; start only {stay} (-n {ranks}), or plan with all: "
        f"mimatrix plan --keep-all"
    )


def _rank_plan(fields: Fields) -> RankPlan:
    return RankPlan(
        name=fields.text("name"),
        busy_s=fields.figure("busy_s"),
        idle_s=fields.figure("idle_s"),
        memory_bytes=fields.size("memory_bytes"),
        room_bytes=fields.size("room_bytes"),
        device=fields.text("device") if "device" in fields.values else "",
    )


def _split(fields: Fields, ranks: int) -> Split:
    micro = fields.wholes("split", least=1)
    if len(micro) != ranks:
        raise ValueError(f"split has {len(micro)} entries and parts has {ranks}")
    total, global_batch = sum(map(sum, micro)), fields.whole("global_batch", least=1)
    if global_batch != total:
        raise ValueError(f"global_batch is {global_batch} and split has {total} samples")
    return Split(micro)


def _shares(fields: Fields, ranks: int) -> Shares:
    fractions = fields.figures("shares", ranks)
    try:
        return Shares(fractions)
    except UserError:
        raise ValueError(f"shares sum to {math.fsum(fractions):.6g}, wanted 1") from None
