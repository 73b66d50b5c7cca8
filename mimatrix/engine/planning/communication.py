"""How long the collectives of a model take on these ranks, timed before training."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

from mimatrix.collectives.shares import Shares
from mimatrix.comm.group import Group
from mimatrix.engine.rank_exchange import RankExchange
from mimatrix.engine.zero.buffers import Buffers
from mimatrix.planner.model.profile import Communication

_CHUNK_BYTES = 16 << 20
"""Size of a timed collective; the time for a model is extrapolated from it."""
_MIN_TOTAL_S, _MAX_CALLS = 0.08, 12
_SYNCS_PER_BATCHNORM = 2
"""Collectives of a synchronised batch norm in a micro-step: one in forward, one in backward."""


def measure_communication(
    group: Group,
    exchange: RankExchange,
    model_bytes: int,
    dtype: torch.dtype,
    device: torch.device,
    num_sync_batchnorms: int = 0,
) -> Communication:
    """Time the collectives of each stage for a whole model, without overlap. A collective.

    Args:
        group: Carries the collectives.
        exchange: How ranks tell each other what they measured.
        model_bytes: Size of all gradients.
        dtype: Of the gradients.
        device: Of the gradients.
        num_sync_batchnorms: Number of synchronised batch norms, at which ranks wait for each other in every micro-step.
    """
    buffers, shares = Buffers.create(group, device), Shares.equal(group.world_size)
    count = max(group.world_size, min(_CHUNK_BYTES, model_bytes) // dtype.itemsize)
    tensor = buffers.collective(count, dtype, device, "measuring")
    tensor.zero_()
    chunks = model_bytes / (count * dtype.itemsize)
    try:
        # Stages 2 and 3 reduce in smaller units, which costs about the same per byte.
        seconds = [
            _measure_call_s(exchange, collective) * chunks
            for collective in (
                lambda: group.all_reduce(tensor),
                lambda: group.reduce_scatter(tensor, shares=shares),
                lambda: group.all_gather(tensor, shares=shares),
            )
        ]
    finally:
        buffers.free(tensor, "measuring")
    small = torch.zeros(256, dtype=dtype, device=device)
    sync_s = _measure_call_s(exchange, lambda: group.all_reduce(small)) if num_sync_batchnorms else 0.0
    return _combine(seconds, measure_exchange_s(exchange), sync_s * num_sync_batchnorms * _SYNCS_PER_BATCHNORM)


def measure_exchange_s(exchange: RankExchange, clock: Callable[[], float] = time.perf_counter) -> float:
    """Time the small exchange among ranks that ends every step. A collective."""
    return _measure_call_s(exchange, lambda: exchange.all_gather({}), clock)


def _combine(seconds: Sequence[float], per_step_s: float, per_micro_step_s: float) -> Communication:
    all_reduce_s, reduce_scatter_s, all_gather_s = seconds
    stages = Communication.of(all_reduce_s, reduce_scatter_s, all_gather_s)
    reason = ", ".join(
        f"{name} {duration_s * 1e3:.3g} ms"
        for name, duration_s in zip(("all-reduce", "reduce-scatter", "all-gather"), seconds, strict=True)
    )
    return Communication(
        tuple(stage_s + per_step_s for stage_s in stages.once_s),
        tuple(stage_s + per_micro_step_s for stage_s in stages.round_s),
        f"measured: {reason}",
    )


def _measure_call_s(
    exchange: RankExchange, call: Callable[[], object], clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the median time of a call on the slowest rank, since the others wait for it."""
    call()  # the first call may try several algorithms
    once_s = _time_calls(call, 1, clock)
    slowest_s = max(message["s"] for message in exchange.all_gather({"s": once_s}))
    median_s = _time_calls(call, max(1, min(_MAX_CALLS, int(_MIN_TOTAL_S / slowest_s))), clock)
    return float(max(message["s"] for message in exchange.all_gather({"s": median_s})))


def _time_calls(call: Callable[[], object], times: int, clock: Callable[[], float]) -> float:
    """Return the median time of several calls: one that was interrupted on a busy host does not count."""
    seconds = []
    for _ in range(times):
        started = clock()
        call()
        seconds.append(clock() - started)
    return statistics.median(seconds)
