"""Fakes of what NCCL is to us, for hosts without a GPU: tasks in flight, a backend that records, grouped messages."""

import queue
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class FakeStreamTask:
    """A collective in flight; `is_done` says whether the GPU has completed it, and may raise as a failed GPU does."""

    is_done: Callable[[], bool] = lambda: True
    waits: int = 0
    future: "torch.futures.Future[Any]" = field(default_factory=torch.futures.Future)

    def wait(self) -> None:
        self.waits += 1

    def is_completed(self) -> bool:
        return self.is_done()

    def get_future(self) -> "torch.futures.Future[Any]":
        return self.future


@dataclass
class FakeNccl:
    """One rank's backend that calls itself NCCL and records its calls.

    All ranks have the same data: a sum is a multiple, and any other reduction is the data. Like NCCL's own, it returns
    no work for a call on the caller's stream.
    """

    rank: int
    ranks: int
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    async_ops: list[bool] = field(default_factory=list)
    """Of each call but those on lists: whether it runs on a stream of its own."""

    def abort(self) -> None:
        self.calls.append(("abort",))

    def name(self) -> str:
        return "nccl"

    def allreduce(self, tensors: list[torch.Tensor], options: Any) -> FakeStreamTask | None:
        self.calls.append(("allreduce", tensors, options.reduceOp))
        self._reduce(tensors[0], tensors[0], options.reduceOp)
        return self._work(options)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> FakeStreamTask | None:
        self.calls.append(("broadcast", tensors, options.rootRank))
        return self._work(options)

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor]) -> FakeStreamTask:
        self.calls.append(("allgather", outputs, inputs))
        return FakeStreamTask()

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], options: Any
    ) -> FakeStreamTask:
        self.calls.append(("reduce_scatter", outputs, inputs, options.reduceOp))
        self._reduce(outputs[0], inputs[0][self.rank], options.reduceOp)
        return FakeStreamTask()

    def _allgather_base(self, full: torch.Tensor, shard: torch.Tensor, options: Any = None) -> FakeStreamTask | None:
        self.calls.append(("_allgather_base", full, shard))
        return self._work(options)

    def _reduce_scatter_base(self, shard: torch.Tensor, full: torch.Tensor, options: Any) -> FakeStreamTask | None:
        self.calls.append(("_reduce_scatter_base", shard, full, options.reduceOp))
        self._reduce(shard, full.view(self.ranks, -1)[self.rank], options.reduceOp)
        return self._work(options)

    def _reduce(self, output: torch.Tensor, own: torch.Tensor, op: Any) -> None:
        output.copy_(own * self.ranks if op == torch.distributed.ReduceOp.SUM else own)

    def _work(self, options: Any) -> FakeStreamTask | None:
        self.async_ops.append(options.asyncOp if options else True)
        return FakeStreamTask() if self.async_ops[-1] else None


Mailboxes = defaultdict[tuple[int, int], "queue.SimpleQueue[torch.Tensor]"]


def fake_mailboxes(ranks: int) -> Mailboxes:
    """Return the messages under way, in order, by sender and receiver."""
    boxes: Mailboxes = defaultdict(queue.SimpleQueue)
    for pair in ((sender, receiver) for sender in range(ranks) for receiver in range(ranks)):
        boxes[pair]  # now, as threads would create one twice
    return boxes


class FakeGroupedMessages:
    """One rank's end of NCCL's grouped messages: all of a group move when it ends, in no order that one could rely on.

    It refuses what NCCL leaves undefined: messages that are not bytes, are empty, are of another size than expected,
    or whose memory another message of the same group writes to.
    """

    def __init__(self, rank: int, boxes: Mailboxes) -> None:
        self._rank, self._boxes = rank, boxes
        self._sends: list[tuple[torch.Tensor, int]] | None = None
        self._receives: list[tuple[torch.Tensor, int]] = []
        self.groups: list[FakeStreamTask] = []

    def _start_coalescing(self) -> None:
        assert self._sends is None, "groups are not nested"
        self._sends, self._receives = [], []

    def send(self, tensors: list[torch.Tensor], dstRank: int, tag: int) -> None:  # noqa: N803 (torch's name)
        assert self._sends is not None, "outside a group it would wait for the receiver"
        self._sends.append((_only(tensors), dstRank))

    def recv(self, tensors: list[torch.Tensor], srcRank: int, tag: int) -> None:  # noqa: N803 (torch's name)
        assert self._sends is not None, "outside a group it would wait for the sender"
        self._receives.append((_only(tensors), srcRank))

    def _end_coalescing(self) -> FakeStreamTask:
        assert self._sends is not None
        written = [_memory(tensor) for tensor, _ in self._receives]
        read = [_memory(tensor) for tensor, _ in self._sends]
        for number, one in enumerate(written):
            for other in (*written[number + 1 :], *read):
                assert one.stop <= other.start or other.stop <= one.start, "messages of one group overlap"
        for tensor, peer in self._sends:
            self._boxes[self._rank, peer].put(tensor.clone())
        for tensor, peer in self._receives:
            message = self._boxes[peer, self._rank].get(timeout=20)
            assert message.numel() == tensor.numel(), "a message of another size"
            tensor.copy_(message)
        self._sends = None
        self.groups.append(FakeStreamTask())
        return self.groups[-1]


def _only(tensors: list[torch.Tensor]) -> torch.Tensor:
    (tensor,) = tensors
    assert tensor.dtype == torch.uint8
    assert tensor.numel() > 0
    return tensor


def _memory(tensor: torch.Tensor) -> range:
    return range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
