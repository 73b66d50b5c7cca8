"""The best plan of given ranks in every stage that fits: what planning, exclusion and what-if questions all ask."""

from collections.abc import Sequence

import numpy as np

from mimatrix.collectives.shares import Shares
from mimatrix.planner.memory_fit import fits, shares_by_room
from mimatrix.planner.model.cost import Cost, cost_of, meets
from mimatrix.planner.model.problem import Priced, Problem
from mimatrix.planner.model.profile import Communication, ModelSize, Profile
from mimatrix.planner.model.split import Split
from mimatrix.planner.search.cost_tables import CostTables, Floats
from mimatrix.planner.search.independent import Independent
from mimatrix.planner.search.limits import ROOMY_SHARES_SLACK
from mimatrix.planner.search.lockstep import Lockstep
from mimatrix.planner.search.stage_search import StageChoice, search_stage, search_with_shares


def price_members(problem: Problem, members: tuple[int, ...], below_s: float = np.inf) -> tuple[Priced, ...]:
    """Return the best of every stage that fits `members`, the one to take first.

    Args:
        problem: The problem that `members` are ranks of.
        members: The ranks that take part.
        below_s: Stages that soon turn out to take this long or longer are left out.
    """
    profiles = tuple(problem.profiles[rank] for rank in members)
    priced: list[Priced] = []
    for stage in sorted(set(problem.stages)):
        tables = CostTables.of(stage, problem.model, profiles)
        given = _given_shares(problem, stage, len(members))
        if fits(tables, given):
            communication = problem.communication.cost(members)
            beaten_s = min((each.cost.step_s for each in priced), default=np.inf)
            choice = _search(problem, stage, tables, given, communication, (below_s, beaten_s))
            if choice is not None:
                priced.append(_price(problem, members, profiles, stage, choice, communication))
    if not priced:
        return ()
    shortest_s = min(each.cost.step_s for each in priced)
    winner = next(each for each in priced if each.cost.step_s <= shortest_s * (1 + problem.stage_gain))
    return (winner, *(each for each in priced if each is not winner))


def predict_step_s(problem: Problem, stage: int, split: Split, shares: Shares) -> float:
    """Return the seconds of a step of all ranks in `stage` with `split` and `shares`, by the cost model of plans."""
    communication = problem.communication.cost(tuple(range(len(problem.profiles))))
    return cost_of(stage, split, shares, problem.model, problem.profiles, communication, problem.equal_counts).step_s


def _given_shares(problem: Problem, stage: int, ranks: int) -> Floats | None:
    """Return shares that are not to be chosen: those in place, and equal ones in stage 0, where nothing is cut."""
    if problem.shares is not None:
        return np.array(problem.shares.fractions)
    return np.full(ranks, 1.0 / ranks) if stage == 0 else None


def _search(
    problem: Problem,
    stage: int,
    tables: CostTables,
    given: Floats | None,
    communication: Communication,
    limits_s: tuple[float, float],
) -> StageChoice | None:
    """Return the best of a stage; None if it takes the first of `limits_s` or longer, any if it takes the second."""
    in_lockstep = meets(stage, problem.equal_counts)
    # In stage 0 a rank steps the whole optimizer itself and continues: that is part of its own time.
    own_s = tables.optimizer_s if stage == 0 else np.zeros(len(tables.optimizer_s))
    workload = (
        Lockstep(tables, problem.global_batch, communication.round_s[stage], one_round=problem.one_micro_step)
        if in_lockstep
        else Independent(tables, problem.global_batch, own_s)
    )
    if given is None:
        return search_stage(workload, tables, *(limit - communication.once_s[stage] for limit in limits_s))
    stepping = tables.optimizer_s[tables.kind_of] * (given if stage else 1.0)
    stepping_s = 0.0 if stage == 0 and not in_lockstep else float(stepping.max())
    return search_with_shares(workload, tables, given, stepping_s)


def _price(
    problem: Problem,
    members: tuple[int, ...],
    profiles: Sequence[Profile],
    stage: int,
    choice: StageChoice,
    communication: Communication,
) -> Priced:
    split = Split(choice.micro)
    shares = Shares(choice.shares) if problem.shares is None else problem.shares

    def price(split: Split, shares: Shares) -> Cost:
        return cost_of(stage, split, shares, problem.model, profiles, communication, problem.equal_counts)

    cost = price(split, shares)
    # Whatever the search did not look at it counted in full, so the bound is as far below as the search's own.
    bound_s = cost.step_s - (choice.seconds - choice.bound_s)
    if problem.min_one_sample_slack:
        for_all = _give_each_a_sample(split, stage, shares, problem.model, profiles)
        other = price(for_all, shares)
        if other.step_s <= cost.step_s * (1 + problem.min_one_sample_slack):
            split, cost = for_all, other
    if problem.shares is None and stage:
        roomy = shares_by_room(stage, split, problem.model, profiles)
        other = price(split, roomy)
        if other.step_s <= cost.step_s * (1 + ROOMY_SHARES_SLACK):
            shares, cost = roomy, other
    return Priced(members, stage, split, shares, cost, bound_s)


def _give_each_a_sample(
    split: Split, stage: int, shares: Shares, model: ModelSize, profiles: Sequence[Profile]
) -> Split:
    """Return a split that gives a sample to each rank that has none and has room for it, from the rank with most.

    If ranks meet once a step, no split in which all have some is better: others get less, and a rank cannot do with
    less than one.
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
