"""Schedules over NCCL's grouped messages against plain sums, on the CPU: the messages are fakes among threads."""

from itertools import product

import pytest
import torch
from support.fake_nccl import FakeGroupedMessages, fake_mailboxes
from support.ranks import together

from mimatrix.collectives import Collective, Shares
from mimatrix.collectives.catalog import AlgorithmRequest, build
from mimatrix.collectives.compose import group_by_owner
from mimatrix.comm.calls import CallSignature, CollectiveOp
from mimatrix.comm.execution.grouped_send_recv import GroupedSendRecvExecutor
from mimatrix.comm.execution.program import Compiler

DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int16, torch.uint8)
OPS = ("sum", "avg", "max", "min")
COUNTS = (0, 1, 7, 103)
SHARDED = (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
SHARES = {2: ([1, 1], [3, 1], [0, 1]), 3: ([1, 1, 1], [6, 0, 1], [0, 0, 5]), 5: ([1] * 5, [5, 0, 1, 3, 0])}


def data(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return what a rank contributes: small whole numbers, so that sums are exact in every type."""
    return ((torch.arange(count) * 7 + rank * 3) % 5).to(dtype)


def expected(ranks: int, count: int, dtype: torch.dtype, op: str) -> torch.Tensor:
    every = torch.stack([data(rank, count, dtype) for rank in range(ranks)]).double()
    results = {"sum": every.sum(0), "avg": every.mean(0), "max": every.amax(0), "min": every.amin(0)}
    return results[op].to(dtype)


def compiler(op: CollectiveOp, algorithm: str, segments: int, rank: int, ranks: int, count: int) -> Compiler:
    request = AlgorithmRequest(op.collective, ranks, shares=op.shares, segments=segments, root=op.root)
    schedule = build(algorithm, request)
    if op.collective in SHARDED and segments > 1 and count:
        schedule = group_by_owner(schedule, (op.shares or Shares.equal(ranks)).cut(count))
    return Compiler(schedule, rank)


def run_on_all(
    op: CollectiveOp, algorithm: str, segments: int, ranks: int, inputs: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Return what each rank has afterwards; `inputs` stay as they are."""
    boxes, count = fake_mailboxes(ranks), inputs[0].numel()

    def on_rank(rank: int) -> torch.Tensor:
        messages, flat = FakeGroupedMessages(rank, boxes), inputs[rank].clone()
        program = compiler(op, algorithm, segments, rank, ranks, count).program(count)
        GroupedSendRecvExecutor(messages, ranks).run(CallSignature.of(op, count, algorithm), program, flat)
        assert [group.waits for group in messages.groups] == [1] * len(messages.groups), "the stream waits for each"
        return flat

    outputs = together(ranks, on_rank)
    assert all(box.empty() for box in boxes.values()), "every message is received"
    return outputs


ALGORITHMS = [("gdraa", 1), ("ring", 1), ("gdraa", 4)]
each_schedule = pytest.mark.parametrize(("algorithm", "segments"), ALGORITHMS)
each_size = pytest.mark.parametrize("ranks", [2, 3, 5])


@each_schedule
@each_size
def test_all_reduce_over_grouped_messages_equals_the_plain_sum(algorithm: str, segments: int, ranks: int) -> None:
    for dtype, reduce_op, count in combinations():
        op = CollectiveOp(Collective.ALL_REDUCE, dtype, reduce_op)
        inputs = [data(rank, count, dtype) for rank in range(ranks)]
        for output in run_on_all(op, algorithm, segments, ranks, inputs):
            assert torch.equal(output, expected(ranks, count, dtype, reduce_op))


@each_schedule
@each_size
def test_reduce_scatter_over_grouped_messages_leaves_each_rank_its_shard(
    algorithm: str, segments: int, ranks: int
) -> None:
    for weights, (dtype, reduce_op, count) in product(SHARES[ranks], combinations()):
        shares = Shares.of(weights)
        op = CollectiveOp(Collective.REDUCE_SCATTER, dtype, reduce_op, shares)
        inputs = [data(rank, count, dtype) for rank in range(ranks)]
        outputs = run_on_all(op, algorithm, segments, ranks, inputs)
        shards = [output.split_with_sizes(list(shares.cut(count)))[rank] for rank, output in enumerate(outputs)]
        assert torch.equal(torch.cat(shards), expected(ranks, count, dtype, reduce_op))


@each_schedule
@each_size
def test_all_gather_over_grouped_messages_fills_all_ranks(algorithm: str, segments: int, ranks: int) -> None:
    for weights, dtype, count in product(SHARES[ranks], DTYPES, COUNTS):
        shares, full = Shares.of(weights), data(0, count, dtype)
        op = CollectiveOp(Collective.ALL_GATHER, dtype, "sum", shares)
        inputs = [torch.full_like(full, 99) for _ in range(ranks)]
        for rank, own in enumerate(inputs):
            own.split_with_sizes(list(shares.cut(count)))[rank].copy_(
                full.split_with_sizes(list(shares.cut(count)))[rank]
            )
        for output in run_on_all(op, algorithm, segments, ranks, inputs):
            assert torch.equal(output, full)


@each_schedule
@each_size
def test_broadcast_over_grouped_messages_copies_the_root(algorithm: str, segments: int, ranks: int) -> None:
    for root, dtype, count in product((0, ranks - 1), DTYPES, COUNTS):
        op = CollectiveOp(Collective.BROADCAST, dtype, root=root)
        inputs = [data(rank, count, dtype) for rank in range(ranks)]
        for output in run_on_all(op, algorithm, segments, ranks, inputs):
            assert torch.equal(output, inputs[root])


def test_low_precision_sums_over_grouped_messages_are_rounded_once() -> None:
    """256 + 1 + 1 + ... in bfloat16 stays 256 if every addition is rounded."""
    inputs = [torch.full((64,), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16) for rank in range(5)]
    for output in run_on_all(CollectiveOp(Collective.ALL_REDUCE, torch.bfloat16), "gdraa", 1, 5, inputs):
        assert (output == 260).all()


def test_average_of_integers_over_grouped_messages_is_rounded_towards_zero() -> None:
    inputs = [torch.tensor([-7, -4, -1, 0, 1, 4, 7], dtype=torch.int16) + rank for rank in range(2)]
    outputs = run_on_all(CollectiveOp(Collective.ALL_REDUCE, torch.int16, "avg"), "gdraa", 1, 2, inputs)
    assert [output.tolist() for output in outputs] == [[-6, -3, 0, 0, 1, 4, 7]] * 2


def combinations() -> list[tuple[torch.dtype, str, int]]:
    """Return each type with each operation, and each type with each length."""
    return [(dtype, OPS[number % len(OPS)], count) for number, (count, dtype) in enumerate(product(COUNTS, DTYPES))]
