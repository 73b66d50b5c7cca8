"""Sentences that explain a plan."""

import numpy as np

from mimatrix.core.text import spell_bytes, spell_seconds
from mimatrix.planner.memory_fit import find_shortage, label_rank
from mimatrix.planner.model.problem import Priced, Problem
from mimatrix.planner.search.cost_tables import Floats

_EXPLAINS = 0.9
"""A speed this close to the ratio of samples explains it; otherwise overhead, the optimizer or memory matters."""


def explain(problem: Problem, priced: tuple[Priced, ...]) -> tuple[str, ...]:
    """Return the reasons for the stage, the batches and the shares of a plan, the stage first."""
    best = priced[0]
    return (
        _winner(problem, priced),
        *(_loser(best, each) for each in priced[1:]),
        *_unfit(problem, priced),
        *_explain_batches(problem, best),
        *_explain_shares(problem, best),
    )


def explain_exclusion(
    ranks: tuple[int, ...], before: tuple[Priced, ...], after: tuple[Priced, ...], problem: Problem
) -> str:
    """Return why a job is faster without `ranks`, which were left out at once."""
    without_s = after[0].cost.step_s
    them = "it" if len(ranks) == 1 else f"these {len(ranks)}"
    if not before:
        return f"nothing fits with {them}, and the step takes {spell_seconds(without_s)} without"
    with_s = before[0].cost.step_s
    return (
        f"the step takes {spell_seconds(with_s)} with {them} and {spell_seconds(without_s)} without: "
        f"{_slowdown(ranks, before, after[0], problem)}"
    )


def _slowdown(ranks: tuple[int, ...], priced: tuple[Priced, ...], after: Priced, problem: Problem) -> str:
    """Return how ranks slow a job down: what they add to moving data, or to computing."""
    one, before = len(ranks) == 1, priced[0]
    saved = before.cost.communication_s - after.cost.communication_s
    if saved > (before.cost.step_s - after.cost.step_s) / 2:
        return f"moving data takes {spell_seconds(saved)} longer with {'it' if one else 'them'}"
    if after.stage < before.stage and after.stage not in {each.stage for each in priced}:
        room = spell_bytes(min(problem.profiles[rank].room_bytes for rank in ranks))
        return f"{'its' if one else 'as little as'} {room} of memory force{'' if one else 's'} stage {before.stage}"
    slowest_s = max(problem.profiles[rank].optimizer_s for rank in ranks)
    if before.stage == 0 and slowest_s > after.cost.step_s / 2:
        takes = "its optimizer step alone takes" if one else "an optimizer step there takes up to"
        return f"{takes} {spell_seconds(slowest_s)}"
    return f"{'it holds' if one else 'they hold'} the others up for longer than {'it helps' if one else 'they help'}"


def _winner(problem: Problem, priced: tuple[Priced, ...]) -> str:
    best = priced[0]
    figures = f"{spell_seconds(best.cost.step_s)} a step, {spell_seconds(best.cost.communication_s)} of it moving data"
    if len(priced) == 1:
        return f"stage {best.stage}: {figures}"
    if best.cost.step_s > min(each.cost.step_s for each in priced):
        return f"stage {best.stage}: {figures}; no higher one is more than {100 * problem.stage_gain:g} % shorter"
    return f"stage {best.stage} is the shortest: {figures}"


def _loser(best: Priced, other: Priced) -> str:
    moving = other.cost.communication_s - best.cost.communication_s
    rest = other.cost.step_s - best.cost.step_s - moving
    why = [
        f"{'+' if more > 0 else '-'}{spell_seconds(abs(more))} for {what}"
        for more, what in ((moving, "moving data"), (rest, "computing and waiting"))
        if abs(more) > 5e-4 * best.cost.step_s
    ]
    return f"stage {other.stage} would take {spell_seconds(other.cost.step_s)}: {', '.join(why) or 'no gain'}"


def _unfit(problem: Problem, priced: tuple[Priced, ...]) -> list[str]:
    members = priced[0].members
    fit = {each.stage for each in priced}
    profiles = [problem.profiles[rank] for rank in members]
    names = [problem.names[rank] for rank in members]
    shortages = {
        stage: find_shortage(stage, problem.model, profiles, problem.shares)
        for stage in sorted(set(problem.stages) - fit)
    }
    # A stage that fits was not searched to the end, being surely longer.
    return [
        f"stage {stage} does not fit: {shortage.describe(names)}" if shortage else f"stage {stage} is longer"
        for stage, shortage in shortages.items()
    ]


def _explain_batches(problem: Problem, best: Priced) -> list[str]:
    """Compare the rank with most samples with the one with fewest: how much faster it is at equal micro-batches."""
    batches = best.split.batches
    most, fewest = batches.index(max(batches)), batches.index(min(batches))
    if batches[most] <= batches[fewest] + 1:
        return []
    names = [problem.names[rank] for rank in best.members]
    high, low = (label_rank(rank, names) for rank in (most, fewest))
    if not batches[fewest]:
        return [f"{low} gets no samples: the others are done before it would be"]
    times = batches[most] / batches[fewest]
    size = min(max(best.split.micro[most]), *(_times(problem, best, rank).size - 1 for rank in (most, fewest)))
    faster = float(_times(problem, best, fewest)[size] / max(_times(problem, best, most)[size], 1e-15))
    gets = f"{high} gets {times:.1f} times the samples of {low}: {_faster(faster)} with micro-batches of {size}"
    if _EXPLAINS * times <= faster <= times / _EXPLAINS:
        return [gets]
    busy = [spell_seconds(best.cost.busy_s[rank]) for rank in (most, fewest)]
    return [
        f"{gets}, and it computes for {busy[0]}, optimizer included, {low} for {busy[1]}"
        f"{_suited(problem, best, fewest)}"
    ]


def _times(problem: Problem, best: Priced, rank: int) -> Floats:
    """Return the seconds of micro-batches of each size, from 0."""
    profile = problem.profiles[best.members[rank]]
    times: Floats = profile.seconds.table + profile.handling_s[best.stage]
    return times


def _faster(factor: float) -> str:
    return f"it is {factor:.1f} times as fast" if f"{factor:.1f}" != "1.0" else "it is as fast"


def _suited(problem: Problem, best: Priced, rank: int) -> str:
    """Return a clause if all micro-batches of a rank have the size that is its fastest per sample."""
    times = _times(problem, best, rank)[1:]
    fastest = int(np.argmin(times / np.arange(1, len(times) + 1))) + 1
    if set(best.split.micro[rank]) != {fastest}:
        return ""
    return f", in micro-batches of {fastest}, its fastest per sample"


def _explain_shares(problem: Problem, best: Priced) -> list[str]:
    """Explain the share that is furthest below what the speed of its rank's optimizer alone would give."""
    if best.stage == 0 or problem.shares is not None:
        return []
    speeds = [1.0 / max(problem.profiles[rank].optimizer_s, 1e-12) for rank in best.members]
    wanted = [speed / sum(speeds) for speed in speeds]
    short = [share / want for share, want in zip(best.shares.fractions, wanted, strict=True)]
    rank = short.index(min(short))
    if short[rank] > 0.98:
        return []
    name = problem.names[best.members[rank]]
    room = spell_bytes(problem.profiles[best.members[rank]].room_bytes)
    return [
        f"rank {rank} ({name}) owns {best.shares.fractions[rank]:.1%} instead of {wanted[rank]:.1%}: "
        f"after its micro-batches it has less of its {room} free than the other ranks"
    ]
