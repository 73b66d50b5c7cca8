"""Policies of hybrid mode by name, and how much a push counts. No torch here.

large     every push stands for a large mini-batch and is scaled as below (our reconstruction of Kim et al.)
plain     asynchronous SGD: every push counts the same
bounded   like plain, but no group is more than a few pushes ahead of the slowest (SSP; Ho et al. 2013)
elastic   groups step locally and are pulled towards common parameters now and then (EASGD; Zhang et al. 2015)
local     groups step locally for long and push how far they came (local SGD; in rounds, DiLoCo; Douillard et al. 2023)
backup    all groups step together, but the last few of each round are not waited for (Chen et al. 2016)

A group computes the mean gradient of n samples on parameters of some version and pushes it; other groups may have
pushed in the meantime. The server steps with `lr * factor`, where the factor is a product of

    scaling      n / B                                   samples in the push / samples that the lr was tuned for
    warm-up      (1 + (n/B - 1) * min(1, s/W)) / (n/B)   if n > B: from no scaling to full scaling within W samples
    staleness    (1 + t) ** -p                           t pushes of others since the group pulled its parameters

With `momentum_correction`, momentum buffers keep their magnitude when the factor changes: they are multiplied by
`previous / factor`. It is off by default: torch's momentum accumulates gradients and not steps, so it needs no
correction as in Goyal et al. (2017). Kim et al. publish no formulas: these are our reconstruction.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mimatrix.core.errors import UserError, nearest


@dataclass(frozen=True, slots=True, kw_only=True)
class PushScaling:
    """How much a push counts."""

    reference: int
    """Samples for which the user tuned the learning rate (B)."""
    lr_scaling: bool = True
    warm_up: int = 0
    """Samples over which scaling is introduced (W); 0 for none."""
    staleness_exponent: float = 0.75
    """The exponent p; 0 for none."""
    momentum_correction: bool = False
    """Whether momentum buffers keep their magnitude when the factor changes."""
    pushes_per_step: int = 0
    """This many pushes on the same version make one step, by their mean over samples; later pushes do not count.
    0: every push is a step."""

    def __post_init__(self) -> None:
        if self.reference < 1:
            raise UserError(f"the global batch is {self.reference}; give the samples of a step, at least 1")
        if self.warm_up < 0:
            raise UserError(f"warm_up is {self.warm_up}; give a number of samples, or 0 for none")
        if not 0 <= self.staleness_exponent <= 2:
            raise UserError(f"staleness_exponent is {self.staleness_exponent:g}; give a number from 0 (none) to 2")

    @classmethod
    def unscaled(cls, reference: int) -> "PushScaling":
        """Return the scaling of textbook asynchronous SGD, where every push counts the same."""
        return cls(reference=reference, lr_scaling=False, staleness_exponent=0.0)

    def factor(self, samples: int, staleness: int, seen: int) -> float:
        """Return the factor on the learning rate.

        Args:
            samples: Samples in each push of the group.
            staleness: Pushes of others since the group pulled its parameters.
            seen: Samples that were applied so far.
        """
        return self._lr_factor(samples, seen) * float((1 + staleness) ** -self.staleness_exponent)

    def correction(self, previous: float | None, factor: float) -> float:
        """Return the factor on momentum buffers when the factor changes from `previous` to `factor`."""
        return previous / factor if self.momentum_correction and previous is not None and factor > 0 else 1.0

    def _lr_factor(self, samples: int, seen: int) -> float:
        ratio = samples / self.reference
        if not self.lr_scaling:
            return 1.0
        if ratio <= 1 or seen >= self.warm_up:
            return ratio
        return 1 + (ratio - 1) * seen / self.warm_up


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """When groups push, what they push, and how the server steps."""

    scaling: PushScaling
    max_staleness: int | None = None
    """Pushes by which a group may be ahead of the slowest; None: any number."""
    local_steps: int = 0
    """Steps that a group makes between pushes; 0: it pushes gradients, and the server steps."""
    outer: Mapping[str, Any] | None = None
    """Hyperparameters of SGD at the server; None: it steps with the user's optimizer."""
    moving_rate: float = 1.0
    """The fraction of the distance to the common parameters that a group moves after a push; 1: all the way."""


POLICIES = ("large", "plain", "bounded", "elastic", "local", "backup")
_OPTIONS = {
    "large": {"reference", "lr_scaling", "warm_up", "staleness_exponent", "momentum_correction"},
    "plain": set[str](),
    "bounded": {"max_staleness"},
    "elastic": {"local_steps", "moving_rate"},
    "local": {"local_steps", "lr", "momentum", "staleness_exponent", "rounds"},
    "backup": {"backups"},
}


def make_policy(name: str, global_batch: int, options: Mapping[str, Any], groups: int = 1) -> Policy:
    """Make the named policy for this number of groups.

    Raises:
        UserError: There is no such policy, or an option is unknown or out of range.
    """
    if name not in POLICIES:
        raise UserError(f'there is no policy "{name}"{nearest(name, POLICIES)}')
    for option in options:
        if option not in _OPTIONS[name]:
            raise UserError(f'the policy "{name}" has no option "{option}"{nearest(option, _OPTIONS[name])}')
    checked = _Options(options)
    unscaled = PushScaling.unscaled(global_batch)
    if name == "large":
        return Policy(scaling=_large(global_batch, checked))
    if name == "backup":
        return Policy(scaling=replace(unscaled, pushes_per_step=groups - _backups(checked, groups)))
    if name == "elastic":
        return _elastic(unscaled, checked)
    if name == "local":
        return _local(global_batch, checked, groups)
    if name == "bounded":
        max_staleness = checked.integer(
            "max_staleness", 3, "give the pushes by which a group may be ahead, 0 or more", 0
        )
        return Policy(scaling=unscaled, max_staleness=max_staleness)
    return Policy(scaling=unscaled)


def _large(global_batch: int, options: "_Options") -> PushScaling:
    return PushScaling(
        reference=options.integer(
            "reference", global_batch, "give the samples that the learning rate was tuned for, at least 1", 1
        ),
        lr_scaling=options.flag("lr_scaling", True),
        warm_up=options.integer("warm_up", 0, "give a number of samples, or 0 for none", 0),
        staleness_exponent=options.staleness_exponent(0.75),
        momentum_correction=options.flag("momentum_correction", False),
    )


def _backups(options: "_Options", groups: int) -> int:
    fix = "give how many groups are not waited for"
    backups = options.integer("backups", 1, fix, 0)
    if backups >= groups:
        raise UserError(f"backups is {backups} of {groups} groups; {fix}, 0 to {groups - 1}")
    return backups


def _elastic(unscaled: PushScaling, options: "_Options") -> Policy:
    fix = "give a fraction above 0 and below 1"
    moving_rate = options.number("moving_rate", 0.1, fix, 0, 1)
    if not 0 < moving_rate < 1:
        raise UserError(f"moving_rate is {moving_rate:g}; {fix}")
    outer = {"lr": 1.0, "momentum": 0.0, "nesterov": False}
    return Policy(scaling=unscaled, local_steps=options.local_steps(8), outer=outer, moving_rate=moving_rate)


def _local(global_batch: int, options: "_Options", groups: int) -> Policy:
    """Make the policy `local`; momentum is for rounds only, since otherwise training diverges (docs/hybrid.md)."""
    rounds = options.flag("rounds", False)
    momentum = options.number("momentum", 0.9 if rounds else 0.0, "give a number from 0 to below 1", 0, 0.999999)
    lr = options.number("lr", 0.7, "give a learning rate above 0, such as 0.7", 1e-12)
    scaling = PushScaling(
        reference=global_batch,
        lr_scaling=False,
        # In a round the mean of all groups counts once; without rounds each group counts for its part.
        staleness_exponent=options.staleness_exponent(0.0 if rounds else 1.0),
        pushes_per_step=groups if rounds else 0,
    )
    outer = {"lr": lr, "momentum": momentum, "nesterov": momentum > 0}
    return Policy(scaling=scaling, local_steps=options.local_steps(50), outer=outer)


class _Options:
    """The options of a script; each method checks one value and raises an error that names the fix."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._options = options

    def number(self, name: str, default: float, fix: str, minimum: float, maximum: float = math.inf) -> float:
        """Return a number within the bounds."""
        value = self._options.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not minimum <= value <= maximum:
            raise UserError(f"{name} is {value!r}; {fix}")
        return float(value)

    def integer(self, name: str, default: int, fix: str, minimum: int) -> int:
        """Return an integer of at least `minimum`."""
        value = self.number(name, default, fix, minimum)
        if value != int(value):
            raise UserError(f"{name} is {value!r}; {fix}")
        return int(value)

    def flag(self, name: str, default: bool) -> bool:
        """Return True or False."""
        value = self._options.get(name, default)
        if not isinstance(value, bool):
            raise UserError(f"{name} is {value!r}; use True or False")
        return value

    def staleness_exponent(self, default: float) -> float:
        """Return the exponent by which late pushes count less."""
        return self.number("staleness_exponent", default, "give a number from 0 (none) to 2", 0, 2)

    def local_steps(self, default: int) -> int:
        """Return the number of steps that a group makes between pushes."""
        return self.integer("local_steps", default, "give how many steps a group makes between pushes, at least 1", 1)
