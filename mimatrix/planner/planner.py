"""Plans: stage, batches, micro-steps and shares that make a step shortest, each choice with its reason."""

from collections.abc import Sequence
from functools import partial

import numpy as np

from mimatrix.collectives.shares import Shares
from mimatrix.core.errors import UserError
from mimatrix.planner.exclusion import MOST, Removal, removals
from mimatrix.planner.memory_fit import by_room, fits, listed, nothing_fits
from mimatrix.planner.model.cost import Cost, cost_of, meets
from mimatrix.planner.model.plan import LeftOut, Part, Plan
from mimatrix.planner.model.problem import Priced, Problem
from mimatrix.planner.model.profile import STAGES, Communication, ModelSize, Profile
from mimatrix.planner.model.split import Split
from mimatrix.planner.reasons import left_out_reason, reasons
from mimatrix.planner.search.cost_tables import Floats, Tables
from mimatrix.planner.search.independent import Alone
from mimatrix.planner.search.lockstep import Together
from mimatrix.planner.search.stage_search import Choice, choose, with_shares

__all__ = ["Problem", "make_plan", "predicted"]

# States may lie where most room is left, if the step is not longer by more than this.
_NEARLY = 2e-3
_MOST_SAMPLES = 1 << 24


def make_plan(problem: Problem) -> Plan:
    """The plan with the shortest step; a sentence where nothing fits."""
    _check(problem)
    members = tuple(range(len(problem.profiles)))
    priced = _price(problem, members)
    if not priced and not problem.may_leave_out:
        raise UserError(nothing_fits(problem))
    taken: list[Removal] = []
    if problem.shares is None and (len(members) <= MOST or not priced):
        taken = removals(problem, priced, partial(_price, problem))
    if not priced and not taken:
        raise UserError(nothing_fits(problem))
    if not taken or not problem.may_leave_out:
        return _plan(problem, priced, (), _advice(problem, priced, taken))
    left = tuple(
        LeftOut(problem.names[rank], left_out_reason(each.ranks, each.before, each.after, problem))
        for each in taken
        for rank in each.ranks
    )
    # Stages that were left because others had been better are priced to the end, to be shown.
    return _plan(problem, _price(problem, taken[-1].after[0].members), left, "")


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
    profiles = tuple(problem.profiles[rank] for rank in members)
    found: list[Priced] = []
    for stage in sorted(set(problem.stages)):
        tables = Tables.of(stage, problem.model, profiles)
        given = _given_shares(problem, stage, len(members))
        if fits(tables, given):
            communication = problem.network(members)
            beaten_s = min((each.cost.step_s for each in found), default=np.inf)
            choice = _choice(problem, stage, tables, given, communication, (below_s, beaten_s))
            if choice is not None:
                found.append(_priced(problem, members, profiles, stage, choice, communication))
    if not found:
        return ()
    shortest = min(each.cost.step_s for each in found)
    winner = next(each for each in found if each.cost.step_s <= shortest * (1 + problem.stage_gain))
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
        Together(tables, problem.global_batch, communication.round_s[stage], one_round=problem.one_micro_step)
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
    shares = Shares(choice.shares) if problem.shares is None else problem.shares

    def price(split: Split, shares: Shares) -> Cost:
        return cost_of(stage, split, shares, problem.model, profiles, communication, problem.equal_counts)

    cost = price(split, shares)
    # What the search did not look at, it paid in full: the bound may be that much lower, and no more.
    bound = cost.step_s - (choice.seconds - choice.bound_s)
    if problem.for_everyone:
        for_all = _shared_out(split, stage, shares, problem.model, profiles)
        other = price(for_all, shares)
        if other.step_s <= cost.step_s * (1 + problem.for_everyone):
            split, cost = for_all, other
    if problem.shares is None and stage:
        roomy = by_room(stage, split, problem.model, profiles)
        other = price(split, roomy)
        if other.step_s <= cost.step_s * (1 + _NEARLY):
            shares, cost = roomy, other
    return Priced(members, stage, split, shares, cost, bound)


def _shared_out(split: Split, stage: int, shares: Shares, model: ModelSize, profiles: Sequence[Profile]) -> Split:
    """A sample for each rank that has none and has room for one, from whoever has most.

    Where ranks meet once a step, no split in which all have some is better: others get less, and who gets one cannot
    do with less.
    """
    micro = list(split.micro)
    for rank, (share, profile) in enumerate(zip(shares.fractions, profiles, strict=True)):
        most = max(range(len(micro)), key=lambda each: sum(micro[each]))
        if micro[rank] or sum(micro[most]) < 2:
            continue
        if profile.room_bytes < model.kept_bytes(stage, share) + float(profile.memory.table[1]):
            continue
        *others, last = micro[most]
        micro[most] = (*others, last - 1) if last > 1 else tuple(others)
        micro[rank] = (1,)
    return Split(tuple(micro))


def _advice(problem: Problem, priced: tuple[Priced, ...], taken: Sequence[Removal]) -> str:
    """Whom to leave out, where all are kept."""
    if not taken:
        return ""
    ranks = tuple(sorted(rank for each in taken for rank in each.ranks))
    names = listed([problem.names[rank] for rank in ranks])
    return f"advice: leave out {names}: {left_out_reason(ranks, priced, taken[-1].after, problem)}"


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
