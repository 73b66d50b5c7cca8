"""The metric by which the best checkpoints of a folder are kept."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mimatrix.core.errors import UserError

_BEST = ("max", "min")


@dataclass(frozen=True, slots=True)
class Metric:
    """By which value the best checkpoints of a folder are kept."""

    value: float
    best: str
    """Which values are better: `max` or `min`."""

    @property
    def goodness(self) -> float:
        """A number that is larger the better the value is; NaN is worse than everything."""
        if math.isnan(self.value):
            return -math.inf
        return self.value if self.best == "max" else -self.value

    @classmethod
    def of(cls, value: Any, best: str) -> "Metric":
        """Return the metric that the user gave.

        Raises:
            UserError: It is not a number, or `best` is neither "max" nor "min".
        """
        if best not in _BEST:
            raise UserError(f'best is {best!r}; give "max" or "min"')
        try:
            return cls(float(value), best)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            raise UserError(f"metric is a {type(value).__name__}; give a number, such as an accuracy") from None

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any]) -> "Metric | None":
        """Return the metric of a checkpoint, if it was saved with one."""
        entry = metadata.get("metric")
        return cls(float(entry["value"]), str(entry["best"])) if entry else None

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON, for the metadata."""
        return {"value": self.value, "best": self.best}
