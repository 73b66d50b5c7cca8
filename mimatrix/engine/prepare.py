"""What `run.prepare` does to a model and its optimizer: plan, shard, register hooks, and build the training loop."""

import hashlib
import logging
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mimatrix.core.errors import UserError
from mimatrix.engine.checkpoint.manager import DEFAULT_FOLDER, CheckpointManager
from mimatrix.engine.checkpoint.state import TrainState
from mimatrix.engine.data.fingerprint import check_same_rows, fingerprint_rows
from mimatrix.engine.data.loading_config import LoadingConfig, check_loading, describe_dataset
from mimatrix.engine.data.position import DataPosition
from mimatrix.engine.data.source import MicroBatchSource
from mimatrix.engine.loop.automatic_saves import AutomaticSaves, PeriodicSaves
from mimatrix.engine.loop.batch_agreement import BatchAgreement
from mimatrix.engine.loop.batch_exchange import BatchExchange
from mimatrix.engine.loop.global_step import GlobalStep, ShadowStep
from mimatrix.engine.loop.hidden_grads import HiddenGrads
from mimatrix.engine.loop.hyperparam_sync import Hyperparams, HyperparamSync
from mimatrix.engine.loop.idle_ranks import IdleRanks
from mimatrix.engine.loop.loader import MicroBatchLoader
from mimatrix.engine.loop.loop_signal import LoopSignal
from mimatrix.engine.loop.lr_scheduler import SyncedLRScheduler
from mimatrix.engine.loop.metric_mailbox import MetricMailbox
from mimatrix.engine.loop.metrics import MetricLog
from mimatrix.engine.loop.preemption import Preemption
from mimatrix.engine.loop.prepared_optimizer import (
    OptimizerStepper,
    OuterStepper,
    PreparedOptimizer,
    Stepper,
    refuse_sharded_state_dict,
)
from mimatrix.engine.loop.train_loop import TrainLoop
from mimatrix.engine.modules import batchnorm
from mimatrix.engine.modules.precision import LossScale
from mimatrix.engine.planning.measure import LossFn, PrepareContext
from mimatrix.engine.planning.plan_follower import PlanFollower
from mimatrix.engine.rank_rng import separate_rng
from mimatrix.engine.user_calls import OPTIMIZER_STEP, with_user_call
from mimatrix.engine.world import World
from mimatrix.engine.zero.guarded_params import GuardedParams, ParamInBatch
from mimatrix.engine.zero.sharded_optimizer import ShardedOptimizer, check_closure
from mimatrix.engine.zero.stages import create_strategy
from mimatrix.engine.zero.strategy import ShardingStrategy
from mimatrix.engine.zero.units import Unit, is_compiled, split_into_units

logger = logging.getLogger(__name__)

LeafModules = tuple[type[nn.Module], ...]


@dataclass(frozen=True, kw_only=True)
class PrepareInputs:
    """What the user gave `run.prepare`."""

    model: nn.Module
    optimizer: Optimizer
    dataset: Any
    loss: LossFn | None = None
    leaf_modules: LeafModules = ()
    read_ahead: bool = False
    loading: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Refuse what cannot be prepared."""
        if not isinstance(self.model, nn.Module) or not isinstance(self.optimizer, Optimizer):
            raise UserError("run.prepare takes the model, the optimizer and the dataset; give them in this order")
        check_loading(self.loading)
        if self.read_ahead and self.loading.get("stream_per_rank"):
            raise UserError(
                "read_ahead draws a batch before ranks have counted their own streams; leave out either read_ahead or "
                "stream_per_rank"
            )

    def open(self, world: World) -> PrepareContext:
        """Move the model to its device, and open the dataset."""
        source = MicroBatchSource(
            self.dataset, world.split, world.rank, seed=world.settings.seed, device=world.device, **self.loading
        )
        self.model.to(world.device)
        return PrepareContext(
            settings=world.settings,
            model=self.model,
            optimizer=self.optimizer,
            loss=self.loss,
            source=source,
            exchange=world.exchange,
            group=world.main,
            rank=world.rank,
            devices=world.devices,
            device=world.device,
            precision=world.precisions[world.rank],
            autocast=world.precision.context,
            num_sync_batchnorms=batchnorm.count_batchnorms(self.model)
            if world.main and world.settings.sync_batchnorm
            else 0,
            leaf_modules=self.leaf_modules,
        )


@dataclass(frozen=True)
class Prepared:
    """What `run.prepare` returns to the user, and the loop behind it."""

    loop: TrainLoop
    optimizer: PreparedOptimizer
    loader: MicroBatchLoader
    lr_scheduler: SyncedLRScheduler | None


def prepare(
    world: World, inputs: PrepareInputs, lr_scheduler: LRScheduler | None, preemption: Preemption | None
) -> Prepared:
    """Plan, shard the model and its optimizer over the ranks, and build the training loop. A collective."""
    context = inputs.open(world)
    plans = PlanFollower(world.rank, context.source, quiet=world.settings.quiet)
    plan = plans.begin(context)
    stage = plan.stage if plan else world.settings.stage_for()
    shares = plan.shares if plan else world.settings.shares_for(world.world_size)
    units = _build_units(world, context, stage)
    peers = _check_consistency(world, inputs.dataset, context.source.loading, units, inputs.optimizer)
    strategy = create_strategy(
        units,
        inputs.optimizer,
        stage,
        shares,
        group=world.main,
        new_group=partial(world.new_group, timed=True),
        exchange=world.exchange,
        timer=world.timer,
        may_share_grads=world.outer is None,
    )
    strategy.broadcast_buffers(inputs.model)
    optimizer = ShardedOptimizer.attach(
        inputs.optimizer, strategy.param_shards(), [param.parameter for unit in units for param in unit.params]
    )
    shadow = _sync_batchnorm(world, context, strategy) if context.num_sync_batchnorms else None
    grads = HiddenGrads([*optimizer.shard_params, *optimizer.shard_params.values(), *_clear_grads(units)])
    scale = LossScale.start("fp16" in world.precisions)
    global_step = GlobalStep(strategy, scale, shadow, grads=grads, params=_guard_in_batch(strategy))
    world.precision.autocast_forward(inputs.model)
    strategy.register_hooks(inputs.model, global_step.on_grad)
    stepper = _create_stepper(world, inputs, strategy, optimizer)
    schedulers = [SyncedLRScheduler(lr_scheduler, global_step)] if lr_scheduler is not None else []
    state = TrainState(
        model=inputs.model,
        strategy=strategy,
        optimizer=optimizer,
        scale=global_step.scale,
        lr_schedulers=schedulers,
        rank=world.rank,
        world_size=world.world_size,
        device=world.device,
        outer=world.outer,
        stream_mode=context.source.stream_mode,
    )
    # Made here and not at the first save: ranks without data do not come to that.
    interval = world.settings.save_interval
    checkpoints = CheckpointManager(
        world.new_group("checkpoint") if world.main else None,
        state,
        folder=str(preemption.folder) if preemption else DEFAULT_FOLDER,
        max_failed_saves=world.settings.max_failed_saves,
    )
    idle_ranks = IdleRanks(world.rank, schedulers, checkpoints, peers)
    periodic = PeriodicSaves(interval) if interval and world.rank == 0 else None
    saves = AutomaticSaves(checkpoints, preemption, periodic)
    metrics = _create_metric_log(world, peers[1].run_id if peers else None)
    reports = BatchExchange(
        world,
        strategy=strategy,
        global_step=global_step,
        plans=plans,
        saves=saves,
        metrics=metrics,
        checkpoints=checkpoints,
        idle_ranks=idle_ranks,
        lr_schedulers=schedulers,
    )
    loop = TrainLoop(
        world,
        strategy=strategy,
        optimizer=optimizer,
        stepper=stepper,
        global_step=global_step,
        source=context.source,
        plans=plans,
        checkpoints=checkpoints,
        idle_ranks=idle_ranks,
        lr_schedulers=schedulers,
        saves=saves,
        reports=reports,
        metrics=metrics,
        stage=stage,
        shares=shares,
    )
    if strategy.is_sharded:
        refuse_sharded_state_dict(inputs.optimizer)
    on_step = with_user_call(world.caller, OPTIMIZER_STEP, loop.on_optimizer_step)
    prepared = PreparedOptimizer(inputs.optimizer, on_step, global_step.check_may_clear_grads)
    agreement = _agree_on_batches(world, context.source)
    loader = MicroBatchLoader(loop, world.caller, agreement, read_ahead=inputs.read_ahead)
    separate_rng(world.rank, world.outer.group if world.outer else 0)
    return Prepared(loop, prepared, loader, schedulers[0] if schedulers else None)


def _agree_on_batches(world: World, source: MicroBatchSource) -> BatchAgreement:
    logs = world.rank == 0 and not world.settings.quiet
    return BatchAgreement(source, world.exchange, call="run.prepare", logs=logs, exposed=world.timer.exposed)


def _build_units(world: World, context: PrepareContext, stage: int) -> tuple[Unit, ...]:
    if world.world_size > 1 and stage == 3 and is_compiled(context.model):
        raise UserError("stage 3 moves parameters while the model runs, which torch.compile does not see; use stage 2")
    return split_into_units(context.model, world.settings.unit_bytes_for(stage, world.devices), context.leaf_modules)


def _create_stepper(
    world: World, inputs: PrepareInputs, strategy: ShardingStrategy, optimizer: ShardedOptimizer
) -> Stepper:
    if world.outer is None:
        return OptimizerStepper.attach(inputs.optimizer)
    # Before the optimizer is taken over: the outer optimizer tries out what it does with parts of tensors.
    world.outer.begin(inputs.model, optimizer, world.main, sharded=strategy.grads_are_sharded)
    strategy.all_gather_params()
    stepper = OptimizerStepper.attach(inputs.optimizer)
    return OuterStepper(world.outer, inputs.optimizer, stepper, world.split.total, world.timer)


def _create_metric_log(world: World, run_id: str | None) -> MetricLog:
    mailbox = None
    if world.main and run_id:
        mailbox = MetricMailbox(world.main.endpoint.store, run_id, world.rank, world.world_size)
    return MetricLog(shows=world.rank == 0 and not world.settings.quiet, mailbox=mailbox)


def _sync_batchnorm(world: World, context: PrepareContext, strategy: ShardingStrategy) -> ShadowStep:
    """Synchronise batch norm over all ranks; a rank without data takes part by shadowing the others."""
    if context.source.split_at(DataPosition(0, 0)).rounds > 1 and world.rank == 0 and not world.settings.quiet:
        logger.info(
            "the model has batch norm, which sees the samples of all ranks but one micro-step at a time; other "
            "micro-steps give other results"
        )

    def run_model() -> None:
        if context.loss is None:
            raise UserError(
                "a rank without data must run the model for its batch norm; give run.prepare loss=..., "
                "or every rank the same number of micro-batches"
            )
        loss = context.loss(context.model, context.source.sample())
        strategy.begin_backward(None)
        loss.backward()  # type: ignore[no-untyped-call]

    shadow = ShadowStep(run_model)
    group = world.new_group("norm", timed=True)
    group.restrict_gpus(windows=not strategy.launches_in_order)
    batchnorm.convert_sync_batchnorm(context.model, group, lambda: shadow.is_active, world.timer)
    return shadow


def _guard_in_batch(strategy: ShardingStrategy) -> GuardedParams:
    """Return what guards the parameters between micro-batches; those that are sharded are guarded all the time."""
    units = () if strategy.counts_forward_passes else strategy.units
    return GuardedParams([(param.names[0], param.parameter) for unit in units for param in unit.params], ParamInBatch)


def _clear_grads(units: Sequence[Unit]) -> list[nn.Parameter]:
    """Drop gradients from before, which the first `zero_grad` of the loop will not; return the parameters."""
    params = [param.parameter for unit in units if unit.trainable for param in unit.params]
    for param in params:
        param.grad = None
    return params


def _check_consistency(
    world: World, dataset: Any, loading: LoadingConfig, units: Sequence[Unit], optimizer: Optimizer
) -> tuple[HyperparamSync, LoopSignal] | None:
    """Check that all ranks prepare the same, and return what keeps them so; None with one rank. A collective."""
    check_closure(optimizer)
    if world.main is None:
        return None
    hyperparams = HyperparamSync(optimizer)
    description = _describe(dataset, units, optimizer, hyperparams.current())
    description |= {"rows": fingerprint_rows(loading), "run": secrets.token_hex(8)}
    messages = world.exchange.all_gather(description)
    _check_same(messages, world.rank)
    check_same_rows(world.exchange, loading, [message["rows"] for message in messages], "run.prepare")
    return hyperparams, LoopSignal(world.main, messages[0]["run"], world.timeout_s)


def _describe(dataset: Any, units: Sequence[Unit], optimizer: Optimizer, settings: Hyperparams) -> dict[str, Any]:
    return {
        "dataset": describe_dataset(dataset),
        "model": _describe_model(units),
        "optimizer": type(optimizer).__name__,
        "settings": settings,
    }


def _describe_model(units: Sequence[Unit]) -> str:
    params = [param for unit in units for param in unit.params]
    facts = [
        (param.names, list(param.shape), param.strides, str(param.parameter.dtype), param.index) for param in params
    ]
    layout = [(unit.trainable, len(unit.params), unit.count) for unit in units]
    digest = hashlib.sha256(repr((facts, layout)).encode()).hexdigest()[:8]
    return f"a model of {len(params)} parameters with {sum(p.shape.numel() for p in params)} elements ({digest})"


def _check_same(messages: Sequence[Mapping[str, Any]], rank: int) -> None:
    """Raise if ranks have prepared different things, before they wait for each other with them."""
    own = messages[rank]
    for other, message in enumerate(messages):
        for what in ("dataset", "model", "optimizer"):
            if message[what] != own[what]:
                raise UserError(
                    f"rank {other} prepared {message[what]} and rank {rank} {own[what]}; prepare the same on all ranks"
                )
        for name in {**message["settings"], **own["settings"]}:
            value, own_value = message["settings"].get(name), own["settings"].get(name)
            if value != own_value:
                number, _, key = name.partition("/")
                raise UserError(
                    f"the optimizer's {key} (param group {number}) is {value} on rank {other} and {own_value} on rank "
                    f"{rank}; give all ranks the same"
                )
