"""What moving a model takes on the ranks that are there: its collectives, timed before training."""

import time
from collections.abc import Callable, Sequence

import torch

from mimatrix.collectives.shares import Shares
from mimatrix.comm.group import Group
from mimatrix.engine.rank_exchange import RankExchange
from mimatrix.engine.zero.buffers import Buffers
from mimatrix.planner.profile import Communication

_PIECE = 16 << 20
"""Bytes that are moved at once; a model is so many of them."""
_LEAST_S, _MOST_TIMES = 0.08, 12
_MEETINGS = 2
"""Of a synchronised batch norm in a micro-step: on the way forward, and on the way back."""


def measure_communication(
    group: Group, exchange: RankExchange, model_bytes: int, dtype: torch.dtype, device: torch.device, norms: int = 0
) -> Communication:
    """The time of each stage's collectives over a whole model, nothing of it hidden. All ranks call it.

    `norms`: synchronised batch norms, at which ranks meet in every micro-step.
    """
    buffers, shares = Buffers(group, device), Shares.equal(group.world_size)
    count = max(group.world_size, min(_PIECE, model_bytes) // dtype.itemsize)
    tensor = buffers.shared(count, dtype, device, "measuring")
    tensor.zero_()
    pieces = model_bytes / (count * dtype.itemsize)
    try:
        # Each rank has the optimizer act at its own pace: stages 2 and 3 reduce by smaller units, which costs about
        # the same for each byte.
        took = [
            _seconds(exchange, act) * pieces
            for act in (
                lambda: group.all_reduce(tensor),
                lambda: group.reduce_scatter(tensor, shares=shares),
                lambda: group.all_gather(tensor, shares=shares),
            )
        ]
    finally:
        buffers.free(tensor, "measuring")
    small = torch.zeros(256, dtype=dtype, device=device)
    meeting_s = _seconds(exchange, lambda: group.all_reduce(small)) if norms else 0.0
    return _of_stages(took, ending_s(exchange), meeting_s * norms * _MEETINGS)


def ending_s(exchange: RankExchange) -> float:
    """What ranks take to tell one another something small, as they do at the end of every step. All call it."""
    return _seconds(exchange, lambda: exchange.all({}))


def _of_stages(took: Sequence[float], each_s: float, meeting_s: float) -> Communication:
    all_reduce_s, reduce_scatter_s, all_gather_s = took
    found = Communication.of(all_reduce_s, reduce_scatter_s, all_gather_s)
    once = tuple(each + each_s for each in found.once_s)
    reason = ", ".join(
        f"{name} {seconds * 1e3:.3g} ms"
        for name, seconds in zip(("all-reduce", "reduce-scatter", "all-gather"), took, strict=True)
    )
    return Communication(once, tuple(each + meeting_s for each in found.round_s), f"measured: {reason}")


def _seconds(exchange: RankExchange, act: Callable[[], object]) -> float:
    """Of one call, the mean over some: the slowest rank's count, since the others wait for it."""
    act()  # a first call may try several ways
    once = _timed(act, 1)
    times = max(1, min(_MOST_TIMES, int(_LEAST_S / max(message["s"] for message in exchange.all({"s": once})))))
    took = _timed(act, times)
    return float(max(message["s"] for message in exchange.all({"s": took})))


def _timed(act: Callable[[], object], times: int) -> float:
    started = time.perf_counter()
    for _ in range(times):
        act()
    return (time.perf_counter() - started) / times
