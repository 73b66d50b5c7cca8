"""How groups go together, by name: each is a few figures, and one service serves them all. No torch here.

large     every push stands for a large mini-batch, and counts by the rules (Kim et al. in our reconstruction)
plain     asynchronous SGD: every push counts alike
bounded   the same, but nobody is more than so many pushes ahead of the last (SSP; Ho et al. 2013)
elastic   groups step by themselves and are drawn to a common middle now and then (EASGD; Zhang et al. 2015)
local     groups step by themselves for long, and push how far they came (local SGD; in rounds, DiLoCo; Douillard et
          al. 2023)
backup    all step together, but the last few of each round are not waited for (Chen et al. 2016)
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mimatrix.core.errors import UserError, nearest
from mimatrix.hybrid.rules import PLAIN, Rules


@dataclass(frozen=True, slots=True)
class Policy:
    """One of them."""

    rules: Rules
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
    plain = Rules(global_batch, **PLAIN)  # type: ignore[arg-type]
    if name == "large":
        return Policy(Rules(**{"reference": global_batch, **options}))
    if name == "backup":
        backups = int(options.get("backups", 1))
        if not 0 <= backups < groups:
            raise UserError(
                f"backups is {backups} of {groups} groups; give how many are not waited for, 0 to {groups - 1}"
            )
        return Policy(replace(plain, together=groups - backups))
    if name == "elastic":
        drawn = float(options.get("drawn", 0.1))
        if not 0 < drawn < 1:
            raise UserError(f"drawn is {drawn:g}; give a part of the way, above 0 and below 1")
        outer = {"lr": 1.0, "momentum": 0.0, "nesterov": False}
        return Policy(plain, local_steps=_steps(options, 8), outer=outer, drawn=drawn)
    if name == "local":
        return _local(global_batch, options, groups)
    return Policy(plain, most_ahead=int(options.get("most_ahead", 3)) if name == "bounded" else None)


def _local(global_batch: int, options: Mapping[str, Any], groups: int) -> Policy:
    """With momentum, groups that come at their own pace go astray (docs/hybrid.md): it is for rounds."""
    rounds = bool(options.get("rounds", False))
    momentum = float(options.get("momentum", 0.9 if rounds else 0.0))
    outer = {"lr": float(options.get("lr", 0.7)), "momentum": momentum, "nesterov": momentum > 0}
    # In a round the mean of all groups counts once: at their own pace each counts for its part.
    damping = float(options.get("damping", 0.0 if rounds else 1.0))
    rules = Rules(global_batch, scales=False, damping=damping, together=groups if rounds else 0)
    return Policy(rules, local_steps=_steps(options, 50), outer=outer)


def _steps(options: Mapping[str, Any], usual: int) -> int:
    found = int(options.get("local_steps", usual))
    if found < 1:
        raise UserError(f"local_steps is {found}; give how many steps a group makes between pushes, at least 1")
    return found
