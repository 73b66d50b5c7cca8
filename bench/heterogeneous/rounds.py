"""Rounds in which every competitor has its turn, and the rows that result."""

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

from bench.heterogeneous.tasks import RankRecord, RanksFailedError, TrainingTask, losses, train

IDEAL = "ideal"
OURS = "mimatrix"
BASE = "ddp"
NAMES = (BASE, "accelerate", "fabric", "fsdp2", "deepspeed", "hand-tuned ddp", "mimatrix even", OURS)
"""In the order of tables. The ideal comes with them."""
PACKAGES = {"accelerate": "accelerate", "fabric": "lightning_fabric", "deepspeed": "deepspeed"}
"""What must be installed for whom."""
MEASURED = (IDEAL, BASE, "hand-tuned ddp", OURS)
"""Those that have a turn in every round; the others may have fewer, being all much like DDP."""
Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class CompetitorTurn:
    """The result of one competitor in one round."""

    who: str
    round: int
    samples_per_s: float
    step_s: float = 0.0
    planning_s: float = 0.0
    plan: dict[str, Any] = field(default_factory=dict)
    losses: tuple[float, ...] = ()


@dataclass
class Comparison:
    """All turns on workers of these speeds, and for a competitor without turns the reason."""

    speeds: tuple[float, ...]
    turns: list[CompetitorTurn] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)


def compare(
    base: TrainingTask,
    rounds: int,
    names: Sequence[str],
    show: Callable[[str], None],
    start: Callable[[TrainingTask], list[RankRecord]] = train,
    peer_rounds: int | None = None,
) -> Comparison:
    """Run each competitor in turn, in another order in every round; one that fails is left out of later rounds."""
    comparison = Comparison(base.speeds, notes=_missing(names))
    for number in range(rounds):
        for who in _rotate([IDEAL, *names], number):
            late = peer_rounds is not None and number >= peer_rounds and who not in MEASURED
            if who in comparison.notes or late:
                continue
            show(f"speeds {_text(base.speeds)}, round {number + 1} of {rounds}: {who}")
            task = replace(base, who=who)
            try:
                comparison.turns.append(_turn(task, number, start(task)))
            except RanksFailedError as failure:
                comparison.notes[who] = f"failed: {failure}"
                show(f"{who} {comparison.notes[who]}")
    return comparison


def rows_of(comparison: Comparison, names: Iterable[str] = NAMES) -> Rows:
    """Return a row for the ideal and each competitor: medians over the rounds, with minimum and maximum.

    Fractions and speed-ups are taken within a round, where both ran under the same conditions.
    """
    return [_row(comparison, who) for who in (IDEAL, *names)]


def _row(comparison: Comparison, who: str) -> dict[str, Any]:
    turns = [turn for turn in comparison.turns if turn.who == who]
    row = {"who": who, "speeds": _text(comparison.speeds), "rounds": len(turns), "note": comparison.notes.get(who, "")}
    fractions, over_ddp = _against(comparison, turns, IDEAL), _against(comparison, turns, BASE)
    return row | {
        "samples_per_s": _median([turn.samples_per_s for turn in turns]),
        "spread": _ends([turn.samples_per_s for turn in turns]),
        "fraction_of_ideal": _median(fractions),
        "fraction_spread": _ends(fractions),
        "speedup_over_ddp": _median(over_ddp),
        "measured_step_s": _median([turn.step_s for turn in turns if turn.step_s]),
        "predicted_step_s": _median([turn.plan["step_s"] for turn in turns if turn.plan]),
        "planning_s": _median([turn.planning_s for turn in turns if turn.plan]),
        "batches": [[sum(micro) for micro in turn.plan["split"]] for turn in turns if turn.plan],
        "loss_apart": _loss_difference(comparison, turns),
        "steps_s": [[turn.plan["step_s"], turn.step_s] for turn in turns if turn.plan],
    }


def _turn(task: TrainingTask, number: int, records: Sequence[RankRecord]) -> CompetitorTurn:
    if task.who == IDEAL:
        return CompetitorTurn(IDEAL, number, sum(record.rate for record in records))
    first = records[0]
    rate = task.global_batch / first.steady_s
    curve = tuple(losses(records, task.global_batch))
    return CompetitorTurn(task.who, number, rate, first.steady_s, first.before_s, first.plan, curve)


def _against(comparison: Comparison, turns: Sequence[CompetitorTurn], other: str) -> list[float]:
    """Return how many times as fast as `other` each turn was in the same round."""
    rates = {turn.round: turn.samples_per_s for turn in comparison.turns if turn.who == other}
    return [turn.samples_per_s / rates[turn.round] for turn in turns if turn.round in rates]


def _loss_difference(comparison: Comparison, turns: Sequence[CompetitorTurn]) -> float | None:
    """Return the largest relative difference of a loss from DDP's: the comparison is fair only if all do the same work."""
    curves = {turn.round: turn.losses for turn in comparison.turns if turn.who == BASE}
    pairs = [
        (ours, theirs)
        for turn in turns
        if turn.losses and turn.round in curves
        for ours, theirs in zip(turn.losses, curves[turn.round], strict=False)
    ]
    return max((abs(ours - theirs) / abs(theirs) for ours, theirs in pairs), default=None)


def _missing(names: Sequence[str]) -> dict[str, str]:
    wanted = {who: PACKAGES[who] for who in names if who in PACKAGES}
    return {who: "not installed" for who, package in wanted.items() if find_spec(package) is None}


def _rotate(names: list[str], by: int) -> list[str]:
    by %= len(names)
    return names[by:] + names[:by]


def _median(values: Sequence[float]) -> float | None:
    return statistics.median(values) if values else None


def _ends(values: Sequence[float]) -> list[float] | None:
    return [min(values), max(values)] if values else None


def _text(speeds: Sequence[float]) -> str:
    return ",".join(f"{speed:g}" for speed in speeds)
