"""Which strategy a run gets: one process, or a ZeRO stage over several ranks."""

from collections.abc import Callable, Sequence

from torch.optim import Optimizer

from mimatrix.collectives.shares import Shares
from mimatrix.comm.group import Group
from mimatrix.comm.memory.arena import slot_bytes
from mimatrix.engine.rank_exchange import RankExchange
from mimatrix.engine.step_timer import StepTimer
from mimatrix.engine.zero.base import DistributedStrategy, ShardingContext
from mimatrix.engine.zero.buffers import Buffers
from mimatrix.engine.zero.sharded_optimizer import check_elementwise
from mimatrix.engine.zero.strategy import ShardingStrategy, SingleProcess
from mimatrix.engine.zero.units import Unit
from mimatrix.engine.zero.zero0 import Zero0
from mimatrix.engine.zero.zero0_shared import Zero0SharedGrads, can_share_grads
from mimatrix.engine.zero.zero1 import Zero1
from mimatrix.engine.zero.zero2 import Zero2
from mimatrix.engine.zero.zero3 import Zero3

STAGES: dict[int, type[DistributedStrategy]] = {0: Zero0, 1: Zero1, 2: Zero2, 3: Zero3}
"""The strategy of each ZeRO stage where there are several ranks."""


def create_strategy(
    units: Sequence[Unit],
    optimizer: Optimizer,
    stage: int,
    shares: Shares,
    *,
    group: Group | None,
    new_group: Callable[[str], Group],
    exchange: RankExchange,
    timer: StepTimer,
    may_share_grads: bool,
) -> ShardingStrategy:
    """Shard a model's units over the ranks. A collective.

    Args:
        units: The model's parameters in units.
        optimizer: The user's optimizer, which from stage 1 on has to treat every element by itself.
        stage: The ZeRO stage, 0 to 3.
        shares: How much of every unit each rank owns.
        group: All ranks, or None where there is one.
        new_group: Makes a further group of the same ranks by name, so that its collectives wait for no others.
        exchange: By which the ranks agree.
        timer: What the collectives are timed with.
        may_share_grads: Whether the optimizer may read gradients in the memory of other ranks (stage 0).
    """
    if group is None:
        return SingleProcess(units)
    if stage > 0:
        check_elementwise(optimizer, stage)
    gather_group = new_group("gather") if stage == 3 else group
    can_share = stage == 0 and may_share_grads and can_share_grads(group, units, optimizer)
    shares_grads = all(message["can_share"] for message in exchange.all_gather({"can_share": can_share}))
    model_bytes = sum(slot_bytes(unit.bytes) for unit in units)
    buffers = Buffers.create(group, units[0].device, model_bytes, {gather_group} - {group})
    context = ShardingContext(
        group=group, gather_group=gather_group, units=units, shares=shares, timer=timer, buffers=buffers
    )
    strategy = (Zero0SharedGrads if shares_grads else STAGES[stage])(context)
    strategy.shard()
    return strategy
