"""Sentences that say why a plan is as it is."""

import numpy as np

from mimatrix.core.units import format_seconds
from mimatrix.planner.memory_fit import bytes_shown, lacks, named
from mimatrix.planner.model.problem import Priced, Problem
from mimatrix.planner.search.cost_tables import Floats

# So near to its samples a rank's speed explains them; otherwise overhead, the optimizer or memory has a part in it.
_EXPLAINS = 0.9


def reasons(problem: Problem, priced: tuple[Priced, ...]) -> tuple[str, ...]:
    """Why this stage and none of the others, why these batches, why these shares. The first is the winner."""
    best = priced[0]
    return (
        _winner(problem, priced),
        *(_loser(best, each) for each in priced[1:]),
        *_unfit(problem, priced),
        *_uneven(problem, best),
        *_shaped(problem, best),
    )


def left_out_reason(
    ranks: tuple[int, ...], before: tuple[Priced, ...], after: tuple[Priced, ...], problem: Problem
) -> str:
    """Why the job is better off without `ranks`, one or several that were tried together."""
    without_s = after[0].cost.step_s
    them = "it" if len(ranks) == 1 else f"these {len(ranks)}"
    if not before:
        return f"nothing fits with {them}, and the step takes {seconds_shown(without_s)} without"
    with_s = before[0].cost.step_s
    return (
        f"the step takes {seconds_shown(with_s)} with {them} and {seconds_shown(without_s)} without: "
        f"{_brake(ranks, before, after[0], problem)}"
    )


def seconds_shown(seconds: float) -> str:
    """With a space, as in a sentence: `212 ms`."""
    text = format_seconds(seconds)
    digits = text.rstrip("abcdefghijklmnopqrstuvwxyz")
    return f"{digits} {text[len(digits) :]}"


def _brake(ranks: tuple[int, ...], priced: tuple[Priced, ...], after: Priced, problem: Problem) -> str:
    """What makes devices a brake: what they add to moving data, or to computing."""
    one, before = len(ranks) == 1, priced[0]
    saved = before.cost.communication_s - after.cost.communication_s
    if saved > (before.cost.step_s - after.cost.step_s) / 2:
        return f"moving data takes {seconds_shown(saved)} longer with {'it' if one else 'them'}"
    if after.stage < before.stage and after.stage not in {each.stage for each in priced}:
        room = bytes_shown(min(problem.profiles[rank].room_bytes for rank in ranks))
        return f"{'its' if one else 'as little as'} {room} of memory force{'' if one else 's'} stage {before.stage}"
    slowest_s = max(problem.profiles[rank].optimizer_s for rank in ranks)
    if before.stage == 0 and slowest_s > after.cost.step_s / 2:
        takes = "its optimizer step alone takes" if one else "an optimizer step there takes up to"
        return f"{takes} {seconds_shown(slowest_s)}"
    return f"{'it holds' if one else 'they hold'} the others up for longer than {'it helps' if one else 'they help'}"


def _winner(problem: Problem, priced: tuple[Priced, ...]) -> str:
    best = priced[0]
    figures = f"{seconds_shown(best.cost.step_s)} a step, {seconds_shown(best.cost.communication_s)} of it moving data"
    if len(priced) == 1:
        return f"stage {best.stage}: {figures}"
    if best.cost.step_s > min(each.cost.step_s for each in priced):
        return f"stage {best.stage}: {figures}; no higher one is more than {100 * problem.stage_gain:g} % shorter"
    return f"stage {best.stage} is the shortest: {figures}"


def _loser(best: Priced, other: Priced) -> str:
    moving = other.cost.communication_s - best.cost.communication_s
    rest = other.cost.step_s - best.cost.step_s - moving
    why = [
        f"{'+' if more > 0 else '-'}{seconds_shown(abs(more))} for {what}"
        for more, what in ((moving, "moving data"), (rest, "computing and waiting"))
        if abs(more) > 5e-4 * best.cost.step_s
    ]
    return f"stage {other.stage} would take {seconds_shown(other.cost.step_s)}: {', '.join(why) or 'no gain'}"


def _unfit(problem: Problem, priced: tuple[Priced, ...]) -> list[str]:
    members = priced[0].members
    fit = {each.stage for each in priced}
    profiles = [problem.profiles[rank] for rank in members]
    names = [problem.names[rank] for rank in members]
    said = {
        stage: lacks(stage, problem.model, profiles, names, problem.shares)
        for stage in sorted(set(problem.stages) - fit)
    }
    # One that fits was not looked at to the end, being surely longer.
    return [f"stage {stage} does not fit: {why}" if why else f"stage {stage} is longer" for stage, why in said.items()]


def _uneven(problem: Problem, best: Priced) -> list[str]:
    """The rank with most and the one with fewest samples, and how much faster the one is with equal micro-batches."""
    batches = best.split.batches
    most, fewest = batches.index(max(batches)), batches.index(min(batches))
    if batches[most] <= batches[fewest] + 1:
        return []
    names = [problem.names[rank] for rank in best.members]
    high, low = (named(rank, names) for rank in (most, fewest))
    if not batches[fewest]:
        return [f"{low} gets no samples: the others are done before it would be"]
    times = batches[most] / batches[fewest]
    size = min(max(best.split.micro[most]), *(_times(problem, best, rank).size - 1 for rank in (most, fewest)))
    faster = float(_times(problem, best, fewest)[size] / max(_times(problem, best, most)[size], 1e-15))
    gets = f"{high} gets {times:.1f} times the samples of {low}: {_faster(faster)} with micro-batches of {size}"
    if _EXPLAINS * times <= faster <= times / _EXPLAINS:
        return [gets]
    busy = [seconds_shown(best.cost.busy_s[rank]) for rank in (most, fewest)]
    return [
        f"{gets}, and it computes for {busy[0]}, optimizer included, {low} for {busy[1]}"
        f"{_suited(problem, best, fewest)}"
    ]


def _times(problem: Problem, best: Priced, rank: int) -> Floats:
    """Of micro-batches of each size, from 0."""
    profile = problem.profiles[best.members[rank]]
    times: Floats = profile.seconds.table + profile.handling_s[best.stage]
    return times


def _faster(factor: float) -> str:
    return f"it is {factor:.1f} times as fast" if f"{factor:.1f}" != "1.0" else "it is as fast"


def _suited(problem: Problem, best: Priced, rank: int) -> str:
    """That a rank's micro-batches are its fastest by the sample, where all of them are."""
    times = _times(problem, best, rank)[1:]
    fastest = int(np.argmin(times / np.arange(1, len(times) + 1))) + 1
    if set(best.split.micro[rank]) != {fastest}:
        return ""
    return f", in micro-batches of {fastest}, its fastest by the sample"


def _shaped(problem: Problem, best: Priced) -> list[str]:
    """The rank whose share is furthest below what its optimizer's speed alone would give it."""
    if best.stage == 0 or problem.shares is not None:
        return []
    speeds = [1.0 / max(problem.profiles[rank].optimizer_s, 1e-12) for rank in best.members]
    wanted = [speed / sum(speeds) for speed in speeds]
    short = [share / want for share, want in zip(best.shares.fractions, wanted, strict=True)]
    rank = short.index(min(short))
    if short[rank] > 0.98:
        return []
    name = problem.names[best.members[rank]]
    room = bytes_shown(problem.profiles[best.members[rank]].room_bytes)
    return [
        f"rank {rank} ({name}) owns {best.shares.fractions[rank]:.1%} instead of {wanted[rank]:.1%}: "
        f"of its {room} less is left beside its micro-batches than elsewhere"
    ]
