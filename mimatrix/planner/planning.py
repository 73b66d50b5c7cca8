"""Plans: stage, batches, micro-steps and shares that make a step shortest, each choice with its reason."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from mimatrix.collectives.shares import Shares
from mimatrix.core.errors import UserError
from mimatrix.planner.cost import cost_of, meets
from mimatrix.planner.micro_steps import Alone
from mimatrix.planner.plan import LeftOut, Part, Plan
from mimatrix.planner.problem import Priced, Problem
from mimatrix.planner.profile import STAGES, Communication, Profile
from mimatrix.planner.reasons import left_out_reason, reasons
from mimatrix.planner.room import by_room, fits, lacks
from mimatrix.planner.rounds import Together
from mimatrix.planner.search import Choice, choose, with_shares
from mimatrix.planner.split import Split
from mimatrix.planner.tables import Floats, Tables

__all__ = ["Problem", "make_plan", "predicted"]

# A higher stage must be better than this to be worth its traffic; a device must cost more to be worth leaving out.
_SAME = 1e-3
# States may lie where most room is left, if the step is not longer by more than this.
_NEARLY = 2e-3
_GAIN = 1e-2
# Up to so many ranks the advice looks for devices to leave out; up to so many it asks
# what each costs on the network, above that it tries one of each kind.
_ADVISED = 64
_MOST_SAMPLES = 1 << 24
_EACH = 16


def make_plan(problem: Problem) -> Plan:
    """The plan with the shortest step; a sentence where nothing fits."""
    _check(problem)
    members = tuple(range(len(problem.profiles)))
    priced = _price(problem, members)
    if not priced and not problem.may_leave_out:
        raise UserError(_nothing_fits(problem))
    left: tuple[LeftOut, ...] = ()
    advice = ""
    if len(members) <= _ADVISED and problem.shares is None:
        better, left = _without_brakes(problem, priced, problem.may_leave_out)
        if problem.may_leave_out:
            priced = better
        elif left:
            advice = f"advice: leave out {left[0].name}: {left[0].reason}"
    if not priced:
        raise UserError(_nothing_fits(problem))
    return _plan(problem, priced, left if problem.may_leave_out else (), advice)


def predicted(problem: Problem, stage: int, split: Split, shares: Shares) -> float:
    """The seconds of a step of all ranks in `stage` with `split` and `shares`, by the model that plans are made by."""
    ranks = tuple(range(len(problem.profiles)))
    communication = problem.network(ranks)
    cost = cost_of(stage, split, shares, problem.model, problem.profiles, communication, problem.equal_counts)
    return cost.step_s


def _check(problem: Problem) -> None:
    ranks = len(problem.profiles)
    if problem.global_batch < 1:
        raise UserError(f"global_batch = {problem.global_batch} has no samples; use 1 or more")
    if problem.global_batch > _MOST_SAMPLES:
        raise UserError(f"global_batch = {problem.global_batch} is beyond planning; use {_MOST_SAMPLES} at the most")
    if not ranks or len(problem.names) != ranks:
        raise UserError(f"{ranks} profiles came with {len(problem.names)} names; give one of each for every rank")
    if problem.shares is not None and len(problem.shares) != ranks:
        raise UserError(f"{len(problem.shares)} shares are given for {ranks} ranks; give one for each rank")
    if not problem.stages or not set(problem.stages) <= set(STAGES):
        raise UserError(f"stages {list(problem.stages)} are not all known; use some of 0, 1, 2, 3")
    for rank, profile in enumerate(problem.profiles):
        if profile.model != problem.model.fingerprint:
            raise UserError(
                f"the profile of rank {rank} ({problem.names[rank]}) is of another model ({profile.model}, and this "
                f"is {problem.model.fingerprint}); measure this one: mimatrix profile script.py"
            )


def _price(problem: Problem, members: tuple[int, ...], below_s: float = np.inf) -> tuple[Priced, ...]:
    """The best of every stage that fits, the one to take first; stages that soon show `below_s` or more are left."""
    communication = problem.network(members)
    profiles = tuple(problem.profiles[rank] for rank in members)
    found: list[Priced] = []
    for stage in sorted(set(problem.stages)):
        tables = Tables.of(stage, problem.model, profiles)
        given = _given_shares(problem, stage, len(members))
        if fits(tables, given):
            beaten_s = min((each.cost.step_s for each in found), default=np.inf)
            choice = _choice(problem, stage, tables, given, communication, (below_s, beaten_s))
            if choice is not None:
                found.append(_priced(problem, members, profiles, stage, choice, communication))
    if not found:
        return ()
    shortest = min(each.cost.step_s for each in found)
    winner = next(each for each in found if each.cost.step_s <= shortest * (1 + _SAME))
    return (winner, *(each for each in found if each is not winner))


def _given_shares(problem: Problem, stage: int, ranks: int) -> Floats | None:
    """Shares that are not to be chosen: those in place, and in stage 0, where nothing is cut, equal ones."""
    if problem.shares is not None:
        return np.array(problem.shares.fractions)
    return np.full(ranks, 1.0 / ranks) if stage == 0 else None


def _choice(
    problem: Problem,
    stage: int,
    tables: Tables,
    given: Floats | None,
    communication: Communication,
    limits_s: tuple[float, float],
) -> Choice | None:
    """The best of a stage. From the first of `limits_s` on there is none, from the second on any will do."""
    together = meets(stage, problem.equal_counts)
    # Alone in stage 0 a rank steps everything itself and goes on: that is part of its own time.
    ahead = tables.optimizer_s if stage == 0 else np.zeros(len(tables.optimizer_s))
    work = (
        Together(tables, problem.global_batch, communication.round_s[stage])
        if together
        else Alone(tables, problem.global_batch, ahead)
    )
    if given is None:
        return choose(work, tables, *(limit - communication.once_s[stage] for limit in limits_s))
    stepping = tables.optimizer_s[tables.kind_of] * (given if stage else 1.0)
    return with_shares(work, tables, given, 0.0 if stage == 0 and not together else float(stepping.max()))


def _priced(
    problem: Problem,
    members: tuple[int, ...],
    profiles: Sequence[Profile],
    stage: int,
    choice: Choice,
    communication: Communication,
) -> Priced:
    split = Split(choice.micro)
    price = partial(cost_of, stage, split, model=problem.model, profiles=profiles, communication=communication)
    shares = Shares(choice.shares) if problem.shares is None else problem.shares
    cost = price(shares, equal_counts=problem.equal_counts)
    # What the search did not look at, it paid in full: the bound may be that much lower, and no more.
    bound = cost.step_s - (choice.seconds - choice.bound_s)
    if problem.shares is None and stage:
        roomy = by_room(stage, split, problem.model, profiles)
        other = price(roomy, equal_counts=problem.equal_counts)
        if other.step_s <= cost.step_s * (1 + _NEARLY):
            shares, cost = roomy, other
    return Priced(members, stage, split, shares, cost, bound)


def _without_brakes(
    problem: Problem, priced: tuple[Priced, ...], repeatedly: bool
) -> tuple[tuple[Priced, ...], tuple[LeftOut, ...]]:
    """The plan without devices that make it slower, one after the other; and which these are."""
    left: list[LeftOut] = []
    members = tuple(range(len(problem.profiles)))
    while len(members) > 1 and (repeatedly or not left):
        below_s = priced[0].cost.step_s / (1 + _GAIN) if priced else np.inf
        tries = [_price(problem, rest, below_s) for rest in _tried(problem, members)]
        better = [each for each in tries if each and each[0].cost.step_s < below_s]
        if not better:
            break
        shortest = min(better, key=lambda each: each[0].cost.step_s)
        (rank,) = set(members) - set(shortest[0].members)
        why = left_out_reason(rank, priced, shortest, problem)
        left.append(LeftOut(problem.names[rank], why))
        priced, members = shortest, shortest[0].members
    return priced, tuple(left)


def _tried(problem: Problem, members: tuple[int, ...]) -> list[tuple[int, ...]]:
    """The members without one, for each that is unlike the others: as a device, and with few also on the network."""
    rests = [tuple(each for each in members if each != rank) for rank in members]
    few = len(members) <= _EACH
    kinds = {
        (problem.profiles[rank], problem.network(rest) if few else None): rest
        for rank, rest in zip(reversed(members), reversed(rests), strict=True)
    }
    return list(kinds.values())


def _plan(problem: Problem, priced: tuple[Priced, ...], left: tuple[LeftOut, ...], advice: str) -> Plan:
    best = priced[0]
    cost = best.cost
    computing = cost.step_s - cost.communication_s
    parts = tuple(
        Part(problem.names[rank], busy, max(0.0, computing - busy), memory, problem.profiles[rank].room_bytes)
        for rank, busy, memory in zip(best.members, cost.busy_s, cost.memory_bytes, strict=True)
    )
    why = (*reasons(problem, priced), *([advice] if advice else []))
    within = max(0.0, float(cost.step_s / min(each.bound_s for each in priced)) - 1)
    return Plan(
        best.stage,
        best.split,
        best.shares,
        parts,
        cost.step_s,
        cost.communication_s,
        why,
        left,
        within if within > 1e-9 else 0.0,
        problem.model.fingerprint,
    )


def _nothing_fits(problem: Problem) -> str:
    said = {
        stage: lacks(stage, problem.model, problem.profiles, problem.names, problem.shares)
        for stage in sorted(set(problem.stages))
    }
    stage = max(said)
    start = f"no stage fits: in stage {stage}" if len(said) > 1 else f"stage {stage} does not fit:"
    fix = "add devices" if "together" in said[stage] or len(problem.profiles) == 1 else "leave it out"
    higher = "" if stage == max(STAGES) or problem.shares is not None else "allow a higher stage, "
    return f"{start} {said[stage]}; {higher}{fix}, or use a smaller model"
