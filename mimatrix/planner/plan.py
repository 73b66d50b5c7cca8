"""A plan: who does how much of every step, what that should take, and why."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from mimatrix.collectives.shares import Shares
from mimatrix.core.errors import UserError
from mimatrix.planner.split import Split

VERSION = 1


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
        """What `to_json` gave."""
        return cls(
            int(fields["stage"]),
            Split.from_json(fields["micro"]),
            Shares(tuple(fields["shares"])),
            tuple(Part(**each) for each in fields["ranks"]),
            float(fields["step_s"]),
            float(fields["communication_s"]),
            tuple(fields["reasons"]),
            tuple(LeftOut(**each) for each in fields["left_out"]),
            float(fields["within"]),
            str(fields["model"]),
            int(fields["version"]),
        )

    @classmethod
    def from_text(cls, text: str, name: str = "the plan") -> "Plan":
        """A plan from a file; a sentence for anything else."""
        try:
            fields = json.loads(text)
            version = fields["mimatrix_plan"]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{name} is no plan; make one with `mimatrix plan --output plan.json`") from None
        if version != VERSION:
            raise UserError(
                f"{name} has version {version} and this is {VERSION}; make it again: mimatrix plan --output plan.json"
            )
        try:
            return cls.from_json(fields)
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{name} is damaged ({error}); make it again: mimatrix plan --output plan.json") from None
