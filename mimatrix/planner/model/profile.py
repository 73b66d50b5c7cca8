"""What was measured of a model and of the devices that are to train it: the input of plans."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from mimatrix.core.errors import UserError
from mimatrix.planner.model.curve import Curve
from mimatrix.planner.model.json_fields import Fields

VERSION = 1
STAGES = (0, 1, 2, 3)
_BRIEFEST_S = 1e-12
"""No pass takes less."""
PerStage = tuple[float, ...]
"""One figure for each stage."""


@dataclass(frozen=True, slots=True)
class ModelSize:
    """What a model and its optimizer hold, the same on every device."""

    fingerprint: str
    """Differs if the curves of one model are not valid for the other."""
    name: str
    parameters: int
    """Trainable elements."""
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    unit_bytes: int
    """Of the largest part that moves at once."""

    def kept_bytes(self, stage: int, share: float) -> int:
        """Return what a rank with this share keeps: parameters, gradients, optimizer state, units in flight."""
        in_flight = (0, 0, 3 * self.unit_bytes, 6 * self.unit_bytes)[stage]
        whole, cut = self.whole_and_cut_bytes(stage)
        return in_flight + whole + round(share * cut)

    def whole_and_cut_bytes(self, stage: int) -> tuple[int, int]:
        """Return what every rank keeps all of, and what is cut over the ranks."""
        kinds = (self.optimizer_bytes, self.gradient_bytes, self.parameter_bytes)
        return sum(kinds[stage:]), sum(kinds[:stage])


@dataclass(frozen=True, slots=True)
class Profile:
    """What was measured of one device with one model."""

    device: str
    """Its kind, for people: `NVIDIA A40`, `cpu`."""
    model: str
    """The fingerprint of the model."""
    seconds: Curve
    """Forward and backward pass of a micro-batch, no collective inside."""
    memory: Curve
    """Bytes at the peak of a micro-batch, in addition to what a rank keeps."""
    room_bytes: int
    """For all that a rank keeps and a micro-batch needs; headroom is subtracted already."""
    optimizer_s: float
    """One step over all trainable elements."""
    handling_s: PerStage = (0.0, 0.0, 0.0, 0.0)
    """What each stage adds to a micro-batch: copying gradients, making room for parameters."""
    noise: float = 0.0
    """The relative difference of times from run to run."""
    took_s: float = 0.0
    """How long it took to measure."""
    overflows: int = 0
    """How often the device ran out of memory while measuring."""

    def slowed(self, factor: float) -> "Profile":
        """Return the profile of a device that takes `factor` times as long."""
        handling = tuple(seconds * factor for seconds in self.handling_s)
        return replace(
            self,
            seconds=self.seconds.scaled(factor),
            optimizer_s=self.optimizer_s * factor,
            handling_s=handling,
        )

    def to_json(self) -> dict[str, Any]:
        """As plain values, for `from_json`."""
        return {**asdict(self), "seconds": list(self.seconds.points), "memory": list(self.memory.points)}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "Profile":
        """Return what `to_json` was called on."""
        return cls._of(Fields.of(fields, "it"))

    @classmethod
    def _of(cls, fields: Fields) -> "Profile":
        return cls(
            fields.label("device"),
            fields.text("model"),
            Curve.of(fields.points("seconds", _BRIEFEST_S)),
            Curve.of(fields.points("memory")),
            fields.size("room_bytes"),
            fields.figure("optimizer_s"),
            fields.figures("handling_s", len(STAGES)),
            fields.figure("noise"),
            fields.figure("took_s"),
            fields.whole("overflows"),
        )


@dataclass(frozen=True, slots=True)
class Communication:
    """What a set of ranks pays for moving a model's gradients and parameters, for each stage."""

    once_s: PerStage
    """In every step."""
    round_s: PerStage = (0.0, 0.0, 0.0, 0.0)
    """In every micro-step in which ranks meet (stages 2 and 3)."""
    reason: str = ""
    """The origin of the figures."""

    @classmethod
    def of(cls, all_reduce_s: float, reduce_scatter_s: float, all_gather_s: float, reason: str = "") -> "Communication":
        """Make the costs of all stages of the time of each collective over a whole model, without overlap."""
        per_round_s = reduce_scatter_s
        once = (all_reduce_s, reduce_scatter_s + all_gather_s, all_gather_s, 0.0)
        return cls(once, (0.0, 0.0, per_round_s, per_round_s + 2 * all_gather_s), reason)

    @property
    def is_free(self) -> bool:
        """Whether it costs nothing, as with one rank; with several ranks it means that the cost is unknown."""
        return not any((*self.once_s, *self.round_s))


@dataclass(frozen=True, slots=True)
class Measurements:
    """What `mimatrix profile` stores: a model, the devices of its ranks, and what they paid for moving it."""

    model: ModelSize
    profiles: tuple[Profile, ...]
    """One for each rank."""
    communication: Communication = field(default_factory=lambda: Communication((0.0,) * 4))
    equal_counts: bool = False
    """Whether the model couples samples of a micro-step (batch norm), so that ranks must run equally many."""

    def to_text(self) -> str:
        """Return JSON for `from_text`."""
        fields = {
            "mimatrix_profile": VERSION,
            "model": asdict(self.model),
            "profiles": [profile.to_json() for profile in self.profiles],
            "communication": asdict(self.communication),
            "equal_counts": self.equal_counts,
        }
        return json.dumps(fields, indent=1, allow_nan=False)

    @classmethod
    def from_text(cls, text: str, name: str = "the profile") -> "Measurements":
        """Return the measurements in a file.

        Args:
            text: The content of the file.
            name: What errors call the file.

        Raises:
            UserError: The file is not a profile, is of another version, or is damaged.
        """
        try:
            fields = Fields.read(text)
            version = fields.take("mimatrix_profile")
        except ValueError:
            raise UserError(f"{name} is not a profile; make one with `mimatrix profile script.py`") from None
        if version != VERSION:
            raise UserError(f"{name} has version {version} and this is {VERSION}; measure again: mimatrix profile")
        try:
            return cls._of(fields)
        except (ValueError, UserError) as error:
            raise UserError(f"{name} is damaged ({error}); measure again: mimatrix profile script.py") from None

    @classmethod
    def _of(cls, fields: Fields) -> "Measurements":
        model = Fields.of(fields.take("model"), "model")
        paid = Fields.of(fields.take("communication"), "communication")
        profiles = tuple(Profile._of(each) for each in fields.objects("profiles"))
        if not profiles:
            raise ValueError("profiles is empty")
        return cls(
            ModelSize(
                model.text("fingerprint"),
                model.text("name"),
                *(model.size(name) for name in ModelSize.__slots__[2:]),
            ),
            profiles,
            Communication(
                paid.figures("once_s", len(STAGES)), paid.figures("round_s", len(STAGES)), paid.text("reason")
            ),
            fields.flag("equal_counts"),
        )
