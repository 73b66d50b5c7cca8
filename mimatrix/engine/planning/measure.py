"""Measure before training: each rank its device, all ranks their collectives; rank 0 then makes the plan."""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mimatrix.comm.group import Group
from mimatrix.core.errors import UserError
from mimatrix.engine.data.position import DataPosition
from mimatrix.engine.data.source import MicroBatchSource
from mimatrix.engine.modules import batchnorm
from mimatrix.engine.planning.communication import measure_communication
from mimatrix.engine.rank_exchange import RankExchange, gather_or_raise
from mimatrix.engine.settings import Settings
from mimatrix.engine.step_timer import StepTimer
from mimatrix.engine.zero.sharded_optimizer import check_elementwise
from mimatrix.engine.zero.units import is_compiled, split_into_units
from mimatrix.planner.model.plan import Plan, explain_misfit
from mimatrix.planner.model.problem import FixedCommunication, Problem
from mimatrix.planner.model.profile import STAGES, Communication, Measurements, ModelSize, Profile
from mimatrix.planner.planner import make_plan
from mimatrix.profiler import (
    Limits,
    ProfileTarget,
    cached_measure,
    code_fingerprint,
    device_identity,
    has_memory_limit,
    limiting_cgroup,
    model_size,
    return_freed_blocks,
)

LossFn = Callable[[nn.Module, Any], torch.Tensor]
_MIN_ONE_SAMPLE_SLACK = 0.05
"""Part of a step that a plan may cost more if every rank then has data and may evaluate inside the loop."""
_STAGE_GAIN = 0.05
"""Part of a step that a higher stage must gain, if a lower one fits: noise in a measurement must not choose it."""
_PROGRESS_EVERY_S = 2.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PrepareContext:
    """What is to be trained, and where: the model is unsharded and on its device."""

    settings: Settings
    model: nn.Module
    optimizer: Optimizer
    loss: LossFn | None
    source: MicroBatchSource
    exchange: RankExchange
    group: Group | None
    """None if there is only one rank."""
    rank: int
    devices: Sequence[str]
    """The device name of every rank."""
    device: torch.device
    precision: str
    autocast: Callable[[], AbstractContextManager[Any]]
    """Enters this rank's precision around forward."""
    num_sync_batchnorms: int
    """Number of synchronised batch norms."""
    leaf_modules: tuple[type[nn.Module], ...] = ()
    """Module classes that are sharded as one unit."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.devices)

    @property
    def global_batch(self) -> int:
        """Samples per step."""
        return self.source.split_at(DataPosition(0, 0)).total


def decide_plan(context: PrepareContext) -> Plan | Path | str | None:
    """Return the plan that the settings ask for, with "auto" decided alike on every rank. A collective then."""
    settings, has_loss = context.settings, context.loss is not None
    if settings.plan == "auto":
        messages = context.exchange.all_gather({"has_loss": has_loss})
        for rank, message in enumerate(messages):
            if message["has_loss"] != has_loss:
                with_loss, without = (rank, context.rank) if message["has_loss"] else (context.rank, rank)
                raise UserError(
                    f"run.prepare was given a loss on rank {with_loss} and none on rank {without}; give loss=loss_fn "
                    "on all ranks or on none"
                )
    return settings.plan_with(has_loss=has_loss)


def measure_ranks(
    context: PrepareContext, communication: Callable[[PrepareContext, ModelSize], Communication] | None = None
) -> Measurements:
    """Profile the devices and the communication of all ranks. A collective; a failure on one rank is raised on all.

    Args:
        context: What is to be trained.
        communication: Finds how long moving the model takes. If omitted, its collectives are timed.
    """
    if context.loss is None:
        raise UserError("measuring runs the model by itself; give run.prepare the loss: loss=loss_fn")
    size = describe_model(context)
    started = time.perf_counter()
    # First, since it takes memory that stays allocated during the run: devices are measured with what is left.
    communication_times = (communication or time_communication)(context, size)
    neighbours, sharers = _count_sharers(context)
    fields = gather_or_raise(context.exchange, lambda: _profile(context, size, neighbours, sharers).to_json())
    profiles = tuple(map(Profile.from_json, fields))
    if context.device.type == "cuda":
        torch.cuda.empty_cache()
    log_rank0(context, f"measured {context.world_size} ranks in {time.perf_counter() - started:.1f} s")
    return Measurements(size, profiles, communication_times, equal_counts=bool(context.num_sync_batchnorms))


def time_communication(context: PrepareContext, size: ModelSize) -> Communication:
    """Time the collectives of the model. A collective."""
    if context.group is None:
        return Communication((0.0,) * 4, reason="nothing moves: one rank")
    dtype = next(parameter.dtype for parameter in context.model.parameters() if parameter.requires_grad)
    return measure_communication(
        context.group,
        context.exchange,
        size.gradient_bytes,
        dtype,
        context.device,
        num_sync_batchnorms=context.num_sync_batchnorms,
    )


def build_problem(context: PrepareContext, measurements: Measurements) -> Problem:
    """Return the planning problem for these measurements and the run's settings."""
    settings = context.settings
    return Problem(
        global_batch=context.global_batch,
        model=measurements.model,
        profiles=measurements.profiles,
        names=tuple(context.devices),
        communication=FixedCommunication(measurements.communication),
        stages=_allowed_stages(context),
        shares=settings.shares_for(context.world_size) if settings.shares is not None else None,
        equal_counts=measurements.equal_counts,
        stage_gain=_STAGE_GAIN,
        # Batch norm sees one micro-step at a time.
        one_micro_step=measurements.equal_counts,
        min_one_sample_slack=_MIN_ONE_SAMPLE_SLACK,
    )


def agree_on_plan(context: PrepareContext, problem: Problem) -> Plan:
    """Make a plan on rank 0 and return it on every rank. A collective."""
    fields = gather_or_raise(context.exchange, lambda: make_plan(problem).to_json() if context.rank == 0 else None)
    plan = Plan.from_json(fields[0])
    batches = " + ".join(map(str, plan.split.batches))
    log_rank0(context, f"stage {plan.stage}, batches {batches}, a step should take {plan.step_s * 1e3:.0f} ms")
    return plan


def load_plan(context: PrepareContext) -> Plan:
    """Return the plan that the settings hold or name; rank 0 reads the file. A collective."""
    given = context.settings.plan
    if isinstance(given, Plan):
        _check_plan(context, given, "the plan")
        return given
    file = str(given)
    fields = gather_or_raise(context.exchange, lambda: _read_plan(file).to_json() if context.rank == 0 else None)
    plan = Plan.from_json(fields[0])
    _check_plan(context, plan, f'plan="{file}"')
    return plan


def describe_model(context: PrepareContext) -> ModelSize:
    """Return the sizes of the model and its fingerprint."""
    unit_bytes = context.settings.unit_bytes_for(3, context.devices)
    units = split_into_units(context.model, unit_bytes, context.leaf_modules)
    largest = max(unit.bytes for unit in units)
    precision = str(context.settings.to_json()["precision"])
    with torch.random.fork_rng(devices=[]):  # datasets may draw random numbers
        sample = context.source.sample()
    return model_size(context.model, context.optimizer, largest, sample, precision)


def rank_hosts(context: PrepareContext) -> list[str]:
    """Return the host of every rank."""
    return [location.host for location in context.group.endpoint.locations] if context.group else [""]


def log_rank0(context: PrepareContext, message: str) -> None:
    """Log a message once per run, on rank 0, unless the run is quiet."""
    if context.rank == 0 and not context.settings.quiet:
        logger.info(message)


def _profile(context: PrepareContext, size: ModelSize, neighbours: int, sharers: int) -> Profile:
    assert context.loss
    # Loading in worker processes overlaps with the computation and costs nothing; loading in the loop counts.
    fetch = lru_cache(maxsize=1)(context.source.sample) if context.source.loads_in_workers else context.source.sample
    target = ProfileTarget(
        model=context.model,
        optimizer=context.optimizer,
        loss=context.loss,
        fetch=fetch,
        device=context.device,
        autocast=context.autocast,
        fingerprint=size.fingerprint,
        precision=context.precision,
        unit_bytes=size.unit_bytes,
        conditions=_describe_conditions(context),
    )
    limits = Limits(max_samples=_max_micro_batch(context), device_sharers=neighbours, cgroup_sharers=sharers)
    if has_memory_limit(context.device):
        return_freed_blocks()
    with batchnorm.unsynchronised(context.model, StepTimer()) if context.num_sync_batchnorms else nullcontext():
        return cached_measure(target, limits, _progress_logger(context))


def _describe_conditions(context: PrepareContext) -> str:
    """Describe what else changes the profile of a model, as far as it can be seen."""
    checkpointing = [
        name for name, module in context.model.named_modules() if getattr(module, "gradient_checkpointing", False)
    ]
    defaults = {key: str(value) for key, value in context.optimizer.defaults.items()}
    facts = [
        str(context.model),
        checkpointing,
        is_compiled(context.model),
        context.num_sync_batchnorms,
        context.source.loads_in_workers,
        code_fingerprint(context.model, context.loss, context.source.dataset),
        defaults,
    ]
    return repr([*facts, torch.get_float32_matmul_precision()])


def _count_sharers(context: PrepareContext) -> tuple[int, int]:
    """Count the ranks that share this rank's memory, and those that share its memory limit; itself included."""
    host = rank_hosts(context)[context.rank]
    memory = device_identity(context.device)
    messages = context.exchange.all_gather({"memory": [host, memory], "limit": [host, memory, limiting_cgroup()]})
    own = messages[context.rank]
    return tuple(sum(message[key] == own[key] for message in messages) for key in ("memory", "limit"))


def _max_micro_batch(context: PrepareContext) -> int:
    """Return the largest micro-batch that this rank can get."""
    given = context.settings.micro_batch
    limit = given[context.rank] if isinstance(given, Sequence) else given
    return min(context.global_batch, limit or context.global_batch)


def _allowed_stages(context: PrepareContext) -> tuple[int, ...]:
    """Return the stages in which this model and optimizer can be trained."""
    if context.world_size == 1:
        return (0,)
    if context.settings.stage != "auto":
        return (int(context.settings.stage),)
    try:
        check_elementwise(context.optimizer, 1)
    except UserError:
        return (0,)
    return STAGES[:3] if is_compiled(context.model) else STAGES


def _read_plan(name: str) -> Plan:
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        choices = '"auto", "profile", "online" or a file that `mimatrix plan --output` wrote'
        raise UserError(f'plan="{name}" cannot be read ({error}); use {choices}') from None
    return Plan.from_text(text, f'plan="{name}"')


def _check_plan(context: PrepareContext, plan: Plan, name: str) -> None:
    if complaint := explain_misfit(plan, context.devices):
        raise UserError(f"{name} {complaint}")
    if plan.global_batch != context.global_batch:
        raise UserError(
            f"{name} is for a global batch of {plan.global_batch} and global_batch is {context.global_batch}; "
            "make them agree"
        )
    if plan.model and plan.model != describe_model(context).fingerprint:
        raise UserError(
            f"{name} was made for another model, optimizer or precision; measure this one: mimatrix profile script.py"
        )
    if plan.stage not in _allowed_stages(context):
        raise UserError(f"{name} is for stage {plan.stage}, in which this run cannot train; make another plan")


def _progress_logger(context: PrepareContext) -> Callable[[float], None]:
    """Return a callback that logs the measured fraction, every few seconds."""
    logged_s = time.monotonic()

    def log_progress(fraction: float) -> None:
        nonlocal logged_s
        if time.monotonic() - logged_s >= _PROGRESS_EVERY_S:
            logged_s = time.monotonic()
            log_rank0(context, f"measuring: {fraction:.0%} done")

    return log_progress
