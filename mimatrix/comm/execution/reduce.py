"""Reductions over tensors in several ranks' memory: in pieces that stay in cache, rounded once."""

from collections.abc import Callable, Sequence

import torch

PIECE_BYTES = 256 << 10
"""Target and one source of this size fit a core's second-level cache together."""

_LOW_PRECISION = (torch.float16, torch.bfloat16)
_Combine = Callable[..., torch.Tensor]
_COMBINE: dict[str, _Combine] = {"sum": torch.add, "avg": torch.add, "max": torch.maximum, "min": torch.minimum}


def reduce_into(
    target: torch.Tensor,
    sources: Sequence[torch.Tensor],
    reduce_op: str,
    divisor: int = 1,
    first: torch.Tensor | None = None,
) -> None:
    """Store in `target` the combination of `first` (by default itself) with all `sources`, divided by `divisor`.

    Sums of low precision are accumulated in float32; averages of integers are those of `divide`.
    """
    own = target if first is None else first
    # What a GPU holds cannot be added to the host's memory before it is copied there.
    is_here = own.device == target.device
    if len(sources) == 1 and divisor == 1 and target.dtype not in _LOW_PRECISION and is_here:
        _COMBINE[reduce_op](own, sources[0], out=target)
        return
    if first is not None:
        target.copy_(first)
    # On a GPU every piece would be one more kernel.
    step = max(1, len(target) if target.is_cuda else PIECE_BYTES // target.element_size())
    for start in range(0, len(target), step):
        piece = target[start : start + step]
        _reduce_piece(piece, [source[start : start + step] for source in sources], reduce_op, divisor)


def _reduce_piece(target: torch.Tensor, sources: Sequence[torch.Tensor], reduce_op: str, divisor: int) -> None:
    combine = _COMBINE[reduce_op]
    total = target.float() if target.dtype in _LOW_PRECISION and reduce_op in ("sum", "avg") else target
    for source in sources:
        combine(total, source, out=total)
    if divisor != 1:
        divide(total, divisor)
    if total is not target:
        target.copy_(total)


def divide(total: torch.Tensor, divisor: int) -> None:
    """Divide a sum in place, to get an average.

    An average of integers is an integer, as with NCCL: the sum of the type, which wraps around where it overflows,
    divided and rounded towards zero, so that -7 / 2 is -3. (Gloo refuses to average integers.)
    """
    if total.is_floating_point():
        total.div_(divisor)
    else:  # in int64, because a small type may not hold the number of ranks
        total.copy_(torch.div(total.long(), divisor, rounding_mode="trunc"))
