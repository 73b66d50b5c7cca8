"""How much a push counts: formulas, and nothing but them. No torch here.

A group computes on parameters of some version, and pushes the mean gradient of so many samples when others may have
pushed meanwhile. The step that the service makes of it is `lr * factor`, where the factor is a product of

    scaling      n / B                          samples in the push, by those that the learning rate was chosen for
    warm-up      (1 + (n/B - 1) * min(1, s/W)) / (n/B)   where n > B: from no scaling to all of it within W samples
    damping      (1 + t) ** -p                  t pushes of others since the group took its parameters

With `corrects`, what momentum has gathered keeps the size that it had where the factor changes: buffers are multiplied
by `before / now`. It is off by default: momentum of torch's kind gathers gradients and not steps, so that it needs no
correction as in Goyal et al. (2017). Kim et al. publish no formulas: these are our reconstruction.
"""

from dataclasses import dataclass

from mimatrix.core.errors import UserError


@dataclass(frozen=True, slots=True)
class PushScaling:
    """Which of them hold."""

    reference: int
    """Samples for which the user chose the learning rate (B)."""
    scales: bool = True
    warm_up: int = 0
    """Samples (W); 0: none."""
    damping: float = 0.75
    """The exponent (p); 0: none."""
    corrects: bool = False
    """Whether what momentum has gathered keeps its size when the factor changes."""
    together: int = 0
    """So many pushes on the same version make one step, by their mean over samples, and whoever comes later counts for
    nothing; 0: every push is a step."""

    def __post_init__(self) -> None:
        if self.reference < 1:
            raise UserError(f"the global batch is {self.reference}; give the samples of a step, at least 1")
        if self.warm_up < 0:
            raise UserError(f"warm_up is {self.warm_up}; give a number of samples, or 0 for none")
        if not 0 <= self.damping <= 2:
            raise UserError(f"damping is {self.damping:g}; give an exponent from 0 (none) to 2")

    def factor(self, samples: int, staleness: int, seen: int) -> float:
        """On the learning rate of pushes of so many samples, for one that is so late, when `seen` were applied."""
        return self._scaling(samples, seen) * float((1 + staleness) ** -self.damping)

    def correction(self, before: float | None, now: float) -> float:
        """On what momentum has gathered, where the factor was `before`."""
        return before / now if self.corrects and before is not None and now > 0 else 1.0

    def _scaling(self, samples: int, seen: int) -> float:
        ratio = samples / self.reference
        if not self.scales:
            return 1.0
        if ratio <= 1 or seen >= self.warm_up:
            return ratio
        return 1 + (ratio - 1) * seen / self.warm_up


PLAIN = {"scales": False, "warm_up": 0, "damping": 0.0, "corrects": False}
"""Of asynchronous SGD as it is in textbooks: every push counts alike."""
