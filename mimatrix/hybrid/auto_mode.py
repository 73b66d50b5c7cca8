"""`mimatrix.init(mode="auto")`: all ranks start together, and continue in the mode that is faster with their model.

Devices and links are measured in `prepare`; rank 0 prices both modes, and all ranks follow its choice.
Why this waits for `prepare`: docs/decisions/0014-a-run-that-decides.md.
"""

import json
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore, Store

from mimatrix.cluster import Cluster, Device
from mimatrix.comm.registration import register
from mimatrix.core.errors import UserError
from mimatrix.core.files import write_atomic
from mimatrix.engine.mode import Membership
from mimatrix.engine.modules.batchnorm import count_batchnorms
from mimatrix.engine.planning.cluster_discovery import discover_cluster, load_described_cluster
from mimatrix.engine.planning.communication import measure_exchange_s
from mimatrix.engine.planning.measure import PrepareContext, build_problem, log_rank0, measure_ranks, time_communication
from mimatrix.engine.prepare import PrepareInputs
from mimatrix.engine.process_groups import GroupFactory
from mimatrix.engine.rank_exchange import gather_or_raise
from mimatrix.engine.settings import Settings
from mimatrix.engine.world import World
from mimatrix.engine.zero.sharded_optimizer import check_elementwise
from mimatrix.hybrid.groups import Groups, locate_rank
from mimatrix.hybrid.mode import Hybrid, is_rejoining, job_rank, job_store, launched_groups, rendezvous_file
from mimatrix.planner.communication import simulate_communication
from mimatrix.planner.hybrid_price import HybridPrice
from mimatrix.planner.mode_choice import ModeChoice, choose_mode
from mimatrix.planner.model.plan import Plan
from mimatrix.planner.model.profile import Communication, ModelSize
from mimatrix.profiler.timing import measure_cpu_share

_QUICK_S = 0.05
"""All-reduces that should take no longer are timed; others would take minutes to tune, and are simulated."""
_VERSION = 2
"""Of the file with the chosen mode."""


class AutoMode:
    """Sync mode, or hybrid mode with the groups of `mimatrix run --groups` or one group per host."""

    def join(self, settings: Settings, device: torch.device, timeout_s: float) -> Membership:
        """Join all ranks of the job; a group that was restarted joins its own ranks at once. A collective."""
        _check(settings)
        rank, world_size = job_rank()
        if world_size == 1:
            return Membership(World.join(settings, device=device))
        store, timeout = job_store(rank, world_size, timeout_s), timedelta(seconds=timeout_s)
        if is_rejoining():
            return _rejoin(settings, store, device, timeout_s)
        register()
        dist.init_process_group(
            "mimatrix", store=PrefixStore("together", store), rank=rank, world_size=world_size, timeout=timeout
        )
        world = World.join(
            settings,
            rank=rank,
            world_size=world_size,
            device=device,
            new_group=GroupFactory(timeout),
            timeout_s=timeout_s,
        )
        return UndecidedMembership(world, store, timeout)


@dataclass(frozen=True)
class UndecidedMembership(Membership):
    """A place among all ranks of the job, until the mode is chosen."""

    store: Store
    timeout: timedelta

    @property
    def measures_devices(self) -> bool:
        """Whether `settle` measures devices."""
        return True

    def settle(self, inputs: PrepareInputs) -> World:
        """Measure devices and links, choose the mode, and return this process's place in it. A collective."""
        world = self.world
        groups = Hybrid().resolve_groups(self.store, world.rank, world.world_size)
        choice = choose(inputs.open(world), groups)
        if choice.mode == "sync" or choice.hybrid is None:
            return world.with_settings(_with_plan(world.settings, choice.sync, choice, inputs.model), choice)
        plan = choice.hybrid.groups[locate_rank(groups, world.rank)[0]].plan
        settings = _with_plan(world.settings, plan, choice, inputs.model)
        self._leave(choice)
        hybrid = hybrid_mode(choice.hybrid)
        joined = hybrid.join_group(settings, self.store, groups, world.rank, world.device, self.timeout.total_seconds())
        return joined.with_settings(joined.settings, choice)

    def _leave(self, choice: ModeChoice) -> None:
        """Leave the process group of all ranks."""
        rank, store = self.world.rank, self.store
        # No rank leaves while another still reads the last exchange.
        store.set(f"auto/heard/{rank}", "")
        store.wait([f"auto/heard/{other}" for other in range(self.world.world_size)], self.timeout)
        dist.destroy_process_group()
        if file := rendezvous_file():
            # Before groups meet, so that it is there when one rejoins; on each host, for those without shared files.
            write_atomic(_choice_file(file), json.dumps({"version": _VERSION, "choice": choice.to_json()}), mode=0o600)


@dataclass(frozen=True)
class RejoinedMembership(Membership):
    """A place in a group that was lost and restarted; the mode was chosen when all groups were there."""

    plan: Plan
    choice: ModeChoice

    def settle(self, inputs: PrepareInputs) -> World:
        """Return the same place, with the plan that the group had."""
        settings = _with_plan(self.world.settings, self.plan, self.choice, inputs.model)
        return self.world.with_settings(settings, self.choice)


def _rejoin(settings: Settings, store: Store, device: torch.device, timeout_s: float) -> Membership:
    choice = _read_choice()
    assert choice.hybrid
    rank, world_size = job_rank()
    groups = launched_groups(world_size)
    plan = choice.hybrid.groups[locate_rank(groups, rank)[0]].plan
    world = hybrid_mode(choice.hybrid).join_group(settings, store, groups, rank, device, timeout_s)
    return RejoinedMembership(world.with_settings(world.settings, choice), plan, choice)


def _read_choice() -> ModeChoice:
    file = rendezvous_file()
    assert file, "a group that rejoins has this file"
    try:
        stored = json.loads(_choice_file(file).read_text())
    except OSError as error:
        raise UserError(f"the chosen mode cannot be read ({error}); start all groups again") from None
    if stored["version"] != _VERSION:
        raise UserError("the chosen mode was written by another version of MiMatrix; start all groups again")
    return ModeChoice.from_json(stored["choice"])


def _choice_file(rendezvous: Path) -> Path:
    return rendezvous.with_name(f"{rendezvous.name}-choice")


def _with_plan(settings: Settings, plan: Plan, choice: ModeChoice, model: nn.Module) -> Settings:
    """Return settings with a plan whose first reason is the choice; batches follow speeds as with "profile"."""
    rebalance = settings.rebalance
    if rebalance is None:
        # With batch norm, batches may only change where memory was measured.
        rebalance = len(plan.parts) > 1 and not (settings.sync_batchnorm and count_batchnorms(model))
    explained = replace(plan, reasons=(choice.reason, *plan.reasons))
    return replace(settings, plan=explained, micro_batch=None, rebalance=rebalance)


def hybrid_mode(price: HybridPrice) -> Hybrid:
    """Return the hybrid mode that was priced."""
    if price.local_steps:
        return Hybrid(policy="local", options={"local_steps": price.local_steps})
    return Hybrid(overlaps=price.overlaps)


def _check(settings: Settings) -> None:
    """Refuse settings by rank, which would not fit the ranks of a group."""
    per_rank = settings.shares is not None or not isinstance(settings.micro_batch, int | None)
    if settings.batch != "auto" or per_rank or settings.plan not in (None, "auto", "profile"):
        raise UserError(
            'mode="auto" measures the devices and plans batches and shares itself; leave out batch, shares, a list of '
            "micro_batch and plan, or choose a mode"
        )
    Hybrid().check(settings)
    if dist.is_initialized():
        raise UserError('mode="auto" makes its own process group; leave out torch.distributed.init_process_group')


def choose(context: PrepareContext, groups: Groups) -> ModeChoice:
    """Choose the mode for these groups, the same on every rank. A collective."""
    cluster = load_described_cluster(context) or discover_cluster(context, [Device(name) for name in context.devices])
    measured = measure_ranks(context, lambda context, size: _communication(context, size, cluster))
    communication = _JobCommunication(
        cluster, measured.model.gradient_bytes, context.world_size, measured.communication
    )
    problem = replace(build_problem(context, measured), communication=communication)
    objection = _objection(context)
    processors = gather_or_raise(context.exchange, measure_cpu_share)
    choices = gather_or_raise(
        context.exchange,
        lambda: choose_mode(problem, groups, cluster, objection, processors).to_json() if context.rank == 0 else None,
    )
    choice = ModeChoice.from_json(choices[0])
    log_rank0(context, choice.reason)
    return choice


def _communication(context: PrepareContext, size: ModelSize, cluster: Cluster) -> Communication:
    """Return what all ranks together pay: timed if that is quick, otherwise simulated on the cluster's links."""
    expected = simulate_communication(cluster, size.gradient_bytes, tuple(range(context.world_size)))
    if expected.once_s[0] <= _QUICK_S:
        return time_communication(context, size)
    exchange_s = measure_exchange_s(context.exchange)
    return replace(expected, once_s=tuple(seconds + exchange_s for seconds in expected.once_s))


@dataclass(frozen=True, slots=True)
class _JobCommunication:
    """What sets of ranks pay: all of them as measured, fewer as simulated on the cluster's links."""

    cluster: Cluster
    model_bytes: int
    ranks: int
    measured: Communication

    def cost(self, members: tuple[int, ...]) -> Communication:
        if len(members) == self.ranks:
            return self.measured
        return simulate_communication(self.cluster, self.model_bytes, members)


def _objection(context: PrepareContext) -> str:
    """Return why this optimizer cannot be sharded over groups; empty if it can."""
    try:
        check_elementwise(context.optimizer, 1)
    except UserError as error:
        return str(error)
    return ""
