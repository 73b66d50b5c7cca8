"""Make plans: the stage, batches, micro-steps and shares with the shortest step, and the reason for each choice."""

from collections.abc import Sequence

from mimatrix.core.errors import UserError
from mimatrix.core.text import join_names
from mimatrix.planner.exclusion import Exclusion, find_exclusions
from mimatrix.planner.memory_fit import describe_no_fit
from mimatrix.planner.model.plan import LeftOut, Plan, RankPlan
from mimatrix.planner.model.problem import Priced, Problem
from mimatrix.planner.model.profile import STAGES
from mimatrix.planner.pricing import price_members
from mimatrix.planner.reasons import explain, explain_exclusion
from mimatrix.planner.search.limits import MAX_EXCLUSION_RANKS, MAX_GLOBAL_BATCH


def make_plan(problem: Problem) -> Plan:
    """Return the plan with the shortest step.

    Args:
        problem: The model, the profiles of the ranks, what communication costs, and what may be chosen.

    Returns:
        The plan, with the reasons for its choices and with the ranks that it leaves out, if it may.

    Raises:
        UserError: The problem is invalid, or no stage fits into the memory of the ranks.

    Example:
        plan = make_plan(scenario(Measurements.from_text(text), cluster, global_batch=512).problem)
    """
    _check(problem)
    members = tuple(range(len(problem.profiles)))
    priced = price_members(problem, members)
    if not priced and not problem.may_leave_out:
        raise UserError(describe_no_fit(problem))
    exclusions: list[Exclusion] = []
    if problem.shares is None and (len(members) <= MAX_EXCLUSION_RANKS or not priced):
        exclusions = find_exclusions(problem, priced)
    if not priced and not exclusions:
        raise UserError(describe_no_fit(problem))
    if not exclusions or not problem.may_leave_out:
        return _build_plan(problem, priced, (), _advise(problem, priced, exclusions))
    left_out = tuple(
        LeftOut(problem.names[rank], explain_exclusion(each.ranks, each.before, each.after, problem))
        for each in exclusions
        for rank in each.ranks
    )
    # Stages that were cut short because others had been better are searched to the end, to be shown.
    return _build_plan(problem, price_members(problem, exclusions[-1].after[0].members), left_out, "")


def _check(problem: Problem) -> None:
    ranks = len(problem.profiles)
    if problem.global_batch < 1:
        raise UserError(f"global_batch = {problem.global_batch} has no samples; use 1 or more")
    if problem.global_batch > MAX_GLOBAL_BATCH:
        raise UserError(f"global_batch = {problem.global_batch} is too large to plan; use {MAX_GLOBAL_BATCH} or less")
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


def _advise(problem: Problem, priced: tuple[Priced, ...], exclusions: Sequence[Exclusion]) -> str:
    """Return which ranks would better be left out, for a plan that keeps all."""
    if not exclusions:
        return ""
    ranks = tuple(sorted(rank for each in exclusions for rank in each.ranks))
    names = join_names([problem.names[rank] for rank in ranks])
    return f"advice: leave out {names}: {explain_exclusion(ranks, priced, exclusions[-1].after, problem)}"


def _build_plan(problem: Problem, priced: tuple[Priced, ...], left_out: tuple[LeftOut, ...], advice: str) -> Plan:
    best = priced[0]
    cost = best.cost
    computing_s = cost.step_s - cost.communication_s
    parts = tuple(
        RankPlan(
            name=problem.names[rank],
            busy_s=busy_s,
            idle_s=max(0.0, computing_s - busy_s),
            memory_bytes=memory_bytes,
            room_bytes=problem.profiles[rank].room_bytes,
            device=problem.profiles[rank].device,
        )
        for rank, busy_s, memory_bytes in zip(best.members, cost.busy_s, cost.memory_bytes, strict=True)
    )
    within = max(0.0, float(cost.step_s / min(each.bound_s for each in priced)) - 1)
    return Plan(
        stage=best.stage,
        split=best.split,
        shares=best.shares,
        parts=parts,
        step_s=cost.step_s,
        communication_s=cost.communication_s,
        reasons=(*explain(problem, priced), *([advice] if advice else [])),
        left_out=left_out,
        within=within if within > 1e-9 else 0.0,
        model=problem.model.fingerprint,
    )
