"""How groups go together, by name: each is a few figures, and one service serves them all. No torch here.

large     every push stands for a large mini-batch, and counts by the rules (Kim et al. in our reconstruction)
plain     asynchronous SGD: every push counts alike
bounded   the same, but nobody is more than so many pushes ahead of the last (SSP; Ho et al. 2013)
elastic   groups step by themselves and are drawn to a common middle now and then (EASGD; Zhang et al. 2015)
local     groups step by themselves for long, and push how far they came (local SGD; in rounds, DiLoCo; Douillard et
          al. 2023)
backup    all step together, but the last few of each round are not waited for (Chen et al. 2016)

How much a push counts: formulas, and nothing but them.

A group computes on parameters of some version, and pushes the mean gradient of so many samples when others may have
pushed meanwhile. The step that the service makes of it is `lr * factor`, where the factor is a product of

    scaling      n / B                          samples in the push, by those that the learning rate was chosen for
    warm-up      (1 + (n/B - 1) * min(1, s/W)) / (n/B)   where n > B: from no scaling to all of it within W samples
    damping      (1 + t) ** -p                  t pushes of others since the group took its parameters

With `corrects`, what momentum has gathered keeps the size that it had where the factor changes: buffers are multiplied
by `before / now`. It is off by default: momentum of torch's kind gathers gradients and not steps, so that it needs no
correction as in Goyal et al. (2017). Kim et al. publish no formulas: these are our reconstruction.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mimatrix.core.errors import UserError, nearest


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


@dataclass(frozen=True, slots=True)
class Policy:
    """One of them."""

    rules: PushScaling
    most_ahead: int | None = None
    """Pushes by which a group may be ahead of the last one; None: any."""
    local_steps: int = 0
    """Steps that a group makes by itself before it pushes; 0: it pushes gradients, and the service steps."""
    outer: Mapping[str, Any] | None = None
    """Settings of SGD at the service, where it does not step by the user's optimizer."""
    drawn: float = 1.0
    """Of the way to the common parameters, what a group goes after a push; 1: all of it."""


NAMES = ("large", "plain", "bounded", "elastic", "local", "backup")
_OPTIONS = {
    "large": {"reference", "scales", "warm_up", "damping", "corrects"},
    "plain": set[str](),
    "bounded": {"most_ahead"},
    "elastic": {"local_steps", "drawn"},
    "local": {"local_steps", "lr", "momentum", "damping", "rounds"},
    "backup": {"backups"},
}


def policy(name: str, global_batch: int, options: Mapping[str, Any], groups: int = 1) -> Policy:
    """By its name, with options of its own, for so many groups."""
    if name not in NAMES:
        raise UserError(f'there is no policy "{name}"{nearest(name, NAMES)}')
    for option in options:
        if option not in _OPTIONS[name]:
            raise UserError(f'the policy "{name}" has no option "{option}"{nearest(option, _OPTIONS[name])}')
    given = _Options(options)
    plain = PushScaling(global_batch, **PLAIN)  # type: ignore[arg-type]
    if name == "large":
        return Policy(_large(global_batch, given))
    if name == "backup":
        most = "give how many groups are not waited for"
        backups = given.whole("backups", 1, most, 0)
        if backups >= groups:
            raise UserError(f"backups is {backups} of {groups} groups; {most}, 0 to {groups - 1}")
        return Policy(replace(plain, together=groups - backups))
    if name == "elastic":
        drawn = given.figure("drawn", 0.1, "give a part of the way, above 0 and below 1", 0, 1)
        if not 0 < drawn < 1:
            raise UserError(f"drawn is {drawn:g}; give a part of the way, above 0 and below 1")
        outer = {"lr": 1.0, "momentum": 0.0, "nesterov": False}
        return Policy(plain, local_steps=given.steps(8), outer=outer, drawn=drawn)
    if name == "local":
        return _local(global_batch, given, groups)
    ahead = given.whole("most_ahead", 3, "give by how many pushes a group may be ahead, 0 or more", 0)
    return Policy(plain, most_ahead=ahead if name == "bounded" else None)


def _large(global_batch: int, given: "_Options") -> PushScaling:
    return PushScaling(
        given.whole("reference", global_batch, "give the samples that the learning rate was chosen for, at least 1", 1),
        given.flag("scales", True),
        given.whole("warm_up", 0, "give a number of samples, or 0 for none", 0),
        given.damping(0.75),
        given.flag("corrects", False),
    )


def _local(global_batch: int, given: "_Options", groups: int) -> Policy:
    """With momentum, groups that come at their own pace go astray (docs/hybrid.md): it is for rounds."""
    rounds = given.flag("rounds", False)
    momentum = given.figure("momentum", 0.9 if rounds else 0.0, "give a number from 0 to below 1", 0, 0.999999)
    lr = given.figure("lr", 0.7, "give a learning rate above 0, such as 0.7", 1e-12)
    outer = {"lr": lr, "momentum": momentum, "nesterov": momentum > 0}
    # In a round the mean of all groups counts once: at their own pace each counts for its part.
    damping = given.damping(0.0 if rounds else 1.0)
    rules = PushScaling(global_batch, scales=False, damping=damping, together=groups if rounds else 0)
    return Policy(rules, local_steps=given.steps(50), outer=outer)


class _Options:
    """Options as a script gives them, each asked for as what it must be."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = given

    def figure(self, name: str, usual: float, wanted: str, least: float, most: float = math.inf) -> float:
        """A number; `wanted` says which."""
        found = self._given.get(name, usual)
        if isinstance(found, bool) or not isinstance(found, int | float) or not least <= found <= most:
            raise UserError(f"{name} is {found!r}; {wanted}")
        return float(found)

    def whole(self, name: str, usual: int, wanted: str, least: int) -> int:
        """A whole one."""
        found = self.figure(name, usual, wanted, least)
        if found != int(found):
            raise UserError(f"{name} is {found!r}; {wanted}")
        return int(found)

    def flag(self, name: str, usual: bool) -> bool:
        """Yes or no."""
        found = self._given.get(name, usual)
        if not isinstance(found, bool):
            raise UserError(f"{name} is {found!r}; use True or False")
        return found

    def damping(self, usual: float) -> float:
        """How much late pushes count less."""
        return self.figure("damping", usual, "give an exponent from 0 (none) to 2", 0, 2)

    def steps(self, usual: int) -> int:
        """That a group makes by itself."""
        wanted = "give how many steps a group makes between pushes, at least 1"
        return self.whole("local_steps", usual, wanted, 1)
