"""What `run.prepare` does to a model and its optimizer: they are cut over the ranks, and act when a batch ends."""

import secrets
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mimatrix.collectives.shares import Shares
from mimatrix.core.errors import UserError
from mimatrix.engine import consistency as sameness
from mimatrix.engine.data.loading import check_loading
from mimatrix.engine.data.source import DataPosition, MicroBatchSource
from mimatrix.engine.loop.global_step import GlobalStep
from mimatrix.engine.loop.hyperparams import HyperparamSync
from mimatrix.engine.loop.loop_signal import LoopSignal
from mimatrix.engine.modules import batchnorm
from mimatrix.engine.modules.precision import LossScale
from mimatrix.engine.outer_optimizer import OuterOptimizer
from mimatrix.engine.planning.measure import LossFn, PrepareContext
from mimatrix.engine.world import World
from mimatrix.engine.zero.hooks import hear_gradients, hear_modules
from mimatrix.engine.zero.sharded_optimizer import ShardedOptimizer, check_elementwise, check_steps
from mimatrix.engine.zero.sharding import Zero0
from mimatrix.engine.zero.single import SingleProcess
from mimatrix.engine.zero.units import Unit, is_compiled, units_of
from mimatrix.engine.zero.zero0_shared import Zero0SharedGrads, reads_in_place
from mimatrix.engine.zero.zero3 import STAGES, Zero3

LeafModules = tuple[type[nn.Module], ...]


def check_prepared(model: nn.Module, optimizer: Optimizer, loading: Mapping[str, Any]) -> None:
    """Refuse what `prepare` cannot take, with a sentence."""
    if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer):
        raise UserError("run.prepare takes the model, the optimizer and the dataset; give them in this order")
    check_loading(loading)


def ground_of(
    world: World,
    model: nn.Module,
    optimizer: Optimizer,
    loss: LossFn | None,
    feed: MicroBatchSource,
    whole: LeafModules,
) -> PrepareContext:
    """What was given, where it is."""
    return PrepareContext(
        settings=world.settings,
        model=model,
        optimizer=optimizer,
        loss=loss,
        source=feed,
        exchange=world.exchange,
        group=world.main,
        rank=world.rank,
        devices=world.devices,
        device=world.device,
        precision=world.precisions[world.rank],
        autocast=world.precision.context,
        num_sync_batchnorms=batchnorm.count(model) if _synchronises(world) else 0,
        leaf_modules=whole,
    )


def cut(
    world: World,
    ground: PrepareContext,
    units: tuple[Unit, ...],
    stage: int,
    shares: Shares,
    outer: OuterOptimizer | None,
) -> GlobalStep:
    """Cut the model and its optimizer over the ranks, so that both take part in global batches. A collective."""
    model, optimizer = ground.model, ground.optimizer
    sharding = _sharding(world, units, optimizer, stage, shares, may_read=outer is None)
    if not isinstance(sharding, SingleProcess):
        _share_buffers(world, model)
    binding = ShardedOptimizer(
        optimizer, sharding.slices(), [piece.parameter for unit in units for piece in unit.pieces]
    )
    scale = LossScale.start("fp16" in world.precisions)
    cycle = GlobalStep(sharding, binding, world.exchange, world.watch, clip_norm=world.settings.clip_norm, scale=scale)
    if ground.num_sync_batchnorms:
        _synchronise(world, ground, cycle)
    world.precision.lower(model)
    if isinstance(sharding, Zero0):
        hear_gradients(units, cycle.arrived)
    if isinstance(sharding, Zero3):
        hear_modules(model, sharding)
    if outer:
        outer.begin(model, binding, world.main, cut=sharding.parts)
        publish(sharding)
        cycle.step_by(lambda micro, own: outer.step(micro.global_samples, world.split.total, own))
    world.watch.memory = partial(_memory, sharding, binding)
    return cycle


def units_to_cut(world: World, ground: PrepareContext, stage: int) -> tuple[Unit, ...]:
    """The parts of the model that are moved at once."""
    if world.ranks > 1 and stage == 3 and is_compiled(ground.model):
        raise UserError("stage 3 moves parameters while the model runs, which torch.compile does not see; use stage 2")
    return units_of(ground.model, world.settings.unit_bytes_for(stage, world.devices), ground.leaf_modules)


def agreed(
    world: World, dataset: Any, units: tuple[Unit, ...], optimizer: Optimizer
) -> tuple[HyperparamSync, LoopSignal] | None:
    """That all ranks prepare the same, and by what they stay so; None where there is one. A collective."""
    check_steps(optimizer)
    if world.main is None:
        return None
    knobs = HyperparamSync(optimizer)
    mine = sameness.described(dataset, units, optimizer, knobs.all())
    said = world.exchange.all({**mine, "run": secrets.token_hex(8)})
    sameness.compare(said, world.rank)
    return knobs, LoopSignal(world.main, said[0]["run"])


def patch(ground: PrepareContext, cycle: GlobalStep, asked: Callable[[], None]) -> None:
    """Let the optimizer act at the end of each global batch and at no other time; `asked`: the loop has called it."""
    model, optimizer = ground.model, ground.optimizer

    def step(closure: Any = None) -> None:
        if closure is not None:
            raise UserError("optimizer.step takes no closure here; call run.backward(loss) before it")
        asked()

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined] # else schedulers complain
    optimizer.step = step  # type: ignore[method-assign,assignment]
    optimizer.zero_grad = _leave_gradients  # type: ignore[method-assign]
    model.zero_grad = _leave_gradients  # type: ignore[method-assign]
    if isinstance(cycle.sharding, Zero0) and cycle.sharding.stage:
        optimizer.register_state_dict_pre_hook(_refuse_state_dict)
        optimizer.register_load_state_dict_pre_hook(_refuse_load_state_dict)


@torch.no_grad()
def publish(sharding: Zero0 | SingleProcess) -> None:
    """Other parameters were written than a step gives: all ranks see them."""
    if isinstance(sharding, Zero0):
        sharding.publish()


def _sharding(
    world: World, units: tuple[Unit, ...], optimizer: Optimizer, stage: int, shares: Shares, *, may_read: bool
) -> Zero0 | SingleProcess:
    if world.main is None:
        return SingleProcess(units)
    if stage > 0:
        check_elementwise(optimizer, stage)
    gathers = world.further_watched("gather") if stage == 3 else None
    reads = stage == 0 and may_read and reads_in_place(world.main, units, optimizer)
    if all(message["reads"] for message in world.exchange.all({"reads": reads})):
        return Zero0SharedGrads(world.main, None, units, shares, world.watch)
    return STAGES[stage](world.main, gathers, units, shares, world.watch)


def _synchronises(world: World) -> bool:
    return world.main is not None and world.settings.sync_batchnorm


def _synchronise(world: World, ground: PrepareContext, cycle: GlobalStep) -> None:
    """Batch norm over all ranks, in which a rank without data takes part."""
    if ground.source.split_at(DataPosition(0, 0)).rounds > 1 and world.rank == 0 and not world.settings.quiet:
        sys.stderr.write(
            "mimatrix: the model has batch norm, which sees the samples of all ranks but one micro-step at a time; "
            "other micro-steps give other numbers\n"
        )
    batchnorm.synchronise(ground.model, world.further_watched("norm"), lambda: cycle.is_ghost, world.watch)

    def ghost() -> None:
        if ground.loss is None:
            raise UserError(
                "a rank without data must run the model for its batch norm; give run.prepare loss=..., "
                "or every rank the same number of micro-batches"
            )
        found = ground.loss(ground.model, ground.source.sample())
        if isinstance(cycle.sharding, Zero3):
            cycle.sharding.back()
        found.backward()  # type: ignore[no-untyped-call]

    cycle.ghost = ghost


def _share_buffers(world: World, model: nn.Module) -> None:
    """All begin with those of rank 0."""
    assert world.main
    for buffer in model.buffers():
        # As bytes: there are buffers of any type, complex ones too.
        same = buffer.detach().contiguous()
        world.main.broadcast(same.reshape(-1).view(torch.uint8))
        buffer.detach().copy_(same)


def _memory(sharding: Zero0 | SingleProcess, binding: ShardedOptimizer) -> dict[str, int]:
    held = sharding.memory if isinstance(sharding, SingleProcess) else sharding.buffers.bytes
    return {**held, "optimizer": binding.state_bytes()}


def _leave_gradients(set_to_none: bool = True) -> None:
    """Gradients end with the step that used them."""


def _refuse_state_dict(*_: Any) -> None:
    raise UserError("the optimizer's state is cut over the ranks; use run.save() and run.load()")


def _refuse_load_state_dict(*_: Any) -> None:
    raise UserError("the optimizer's state is cut over the ranks; load it before run.prepare, or use run.load()")
