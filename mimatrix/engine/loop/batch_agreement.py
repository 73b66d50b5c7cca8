"""What ranks agree on when a global batch begins: that they read the same samples, or how many each has of its own.

Ranks tell each other where none of them is inside a global batch, and never while micro-batches are drawn: those may be
drawn ahead, and ranks have different numbers of them.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from mimatrix.core.errors import UserError
from mimatrix.engine.data.position import DataPosition, MicroBatch
from mimatrix.engine.data.source import MicroBatchSource
from mimatrix.engine.data.stream import StreamMode, StreamPosition
from mimatrix.engine.rank_exchange import Message, RankExchange
from mimatrix.planner.model.split import Split

logger = logging.getLogger(__name__)

Drawn = tuple[MicroBatch, Any]


class BatchAgreement:
    """Compares or counts, with the other ranks, what this rank has drawn from its source."""

    def __init__(
        self,
        source: MicroBatchSource,
        exchange: RankExchange,
        *,
        call: str,
        logs: bool,
        exposed: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._source, self._exchange, self._exposed = source, exchange, exposed
        self._call, self._logs = call, logs
        self._split: Split | None = None
        """Of the global batch that has begun, if ranks have counted it."""
        self._has_logged_end = False

    def agree(self, drawn: Drawn | None, position: DataPosition) -> Drawn | None:
        """Return what a rank trains on next; None at the end of the epoch. A collective where a global batch begins.

        Args:
            drawn: What it has drawn; None at the end of what it reads.
            position: The next global batch, if this is the first micro-batch of it.

        Raises:
            UserError: Ranks do not read the same; raised on all of them.
        """
        mode = self._source.stream_mode
        if drawn is not None and drawn[0].index:
            micro, data = drawn
            return (replace(micro, split=self._split), data) if self._split else drawn
        if mode is None and (drawn is None or drawn[0].digest is None):
            return drawn
        with self._exposed():
            messages = self._exchange.all_gather(_describe(drawn, mode))
        if mode:
            _check_modes(messages)
        if mode and mode.per_rank:
            return self._count(drawn, position, mode.num_readers, messages)
        _check_same(messages, self._call, is_stream=mode is not None)
        return drawn

    def agree_on_all(self, micro_batches: Iterable[Drawn]) -> Iterator[Drawn]:
        """Yield the micro-batches of an epoch, agreed with the other ranks. A collective for each global batch."""
        drawn_from, position = iter(micro_batches), DataPosition(0, 0)
        while agreed := self.agree(next(drawn_from, None), position):
            yield agreed
            if agreed[0].is_last:
                position = agreed[0].next_position()

    def _count(
        self, drawn: Drawn | None, position: DataPosition, num_readers: int, messages: Sequence[Message]
    ) -> Drawn | None:
        """Make a global batch of what all ranks have drawn from streams of their own."""
        sizes = tuple(tuple(message["sizes"] or ()) for message in messages)
        ended = [rank for rank, message in enumerate(messages) if message["sizes"] is None]
        if position.batch == 0:
            self._has_logged_end = False
            self._check_first(ended, len(messages))
            _check_differ(messages)
        if len(ended) == len(messages) or (ended and self._source.drops_last):
            self._log_end(ended, position, len(messages), "the epoch ends with it")
            return None
        if ended:
            self._log_end(ended, position, len(messages), "global batches are smaller from then on")
        self._split = Split(sizes)
        if drawn is None:
            stream = position.stream or StreamPosition.start(num_readers)
            epoch, batch = position.epoch, position.batch
            return MicroBatch(epoch=epoch, batch=batch, index=0, sizes=(), split=self._split, stream=stream), None
        return replace(drawn[0], split=self._split), drawn[1]

    def _check_first(self, ended: Sequence[int], num_ranks: int) -> None:
        if len(ended) == num_ranks and not self._source.drops_last:
            raise UserError(f"the streams of all ranks have no samples; give {self._call} streams that have some")
        if ended and self._source.drops_last:
            raise UserError(
                f"the stream of rank {ended[0]} does not fill its part of one global batch, and with drop_last=True "
                "the epoch ends there; use a smaller global_batch, or drop_last=False"
            )

    def _log_end(self, ended: Sequence[int], position: DataPosition, num_ranks: int, then: str) -> None:
        if self._has_logged_end or len(ended) == num_ranks:
            return
        self._has_logged_end = True
        if self._logs:
            ranks = " and ".join(map(str, ended))
            logger.info(
                f"the stream of rank {ranks} has ended at global batch {position.batch} of epoch {position.epoch}, "
                f"before those of other ranks; {then}"
            )


def _describe(drawn: Drawn | None, mode: StreamMode | None) -> Message:
    read = {"per_rank": mode.per_rank, "readers": mode.num_readers} if mode else {}
    if drawn is None:
        return {"sizes": None, "samples": 0, "digest": "", **read}
    micro = drawn[0]
    return {"sizes": micro.sizes, "samples": micro.global_samples, "digest": micro.digest, **read}


def _check_modes(messages: Sequence[Message]) -> None:
    """Raise if ranks were told to read their streams in different ways."""
    first = messages[0]
    for rank, message in enumerate(messages):
        if message["per_rank"] != first["per_rank"]:
            raise UserError(
                f"rank {rank} was given stream_per_rank={message['per_rank']} and rank 0 {first['per_rank']}; give all "
                "ranks the same"
            )
        if message["readers"] != first["readers"] and not first["per_rank"]:
            raise UserError(
                f"rank {rank} reads the stream with {message['readers']} loader processes and rank 0 with "
                f"{first['readers']}, which gives another order; give all ranks the same num_workers"
            )


def _check_differ(messages: Sequence[Message]) -> None:
    """Raise if two ranks have the same samples at the start of streams of their own."""
    ranks: dict[str, int] = {}
    for rank, message in enumerate(messages):
        other = ranks.setdefault(message["digest"], rank) if message["digest"] else rank
        if other != rank:
            raise UserError(
                f"ranks {other} and {rank} read the same samples from streams of their own, which would then be used "
                "several times; shard the stream by rank, or leave stream_per_rank out"
            )


def _check_same(messages: Sequence[Message], call: str, *, is_stream: bool) -> None:
    """Raise if ranks have read other samples than rank 0, or not as many."""
    first = messages[0]
    for rank, message in enumerate(messages):
        if (message["samples"], message["digest"]) == (first["samples"], first["digest"]):
            continue
        if not message["digest"] and not first["digest"]:
            raise UserError(
                f"the stream of rank {rank} has {message['samples']} samples for this global batch and that of rank 0 "
                f"{first['samples']}; let all ranks read the same, or give {call} stream_per_rank=True"
            )
        if not is_stream:
            raise UserError(
                f"the sampler gives rank {rank} another order than rank 0, and the split cuts one order; seed it "
                "with the same number on all ranks"
            )
        use = "evaluate" if call == "run.evaluate" else "train on"
        raise UserError(
            f"rank {rank} reads other samples from the stream than rank 0: it is sharded or shuffled by rank; give "
            f"{call} stream_per_rank=True to {use} each rank's own stream, or stream_per_rank=False if only random "
            "augmentation differs"
        )
