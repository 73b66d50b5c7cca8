"""Collectives over windows against plain sums: every length, share, type, operation and number of ranks."""

import threading

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.ranks import in_groups

from mimatrix.collectives import Collective, Shares
from mimatrix.comm import AlgorithmChoice, Group
from mimatrix.comm.execution.staging import CHUNK_BYTES
from mimatrix.comm.tuning.choice import Transport
from mimatrix.core.errors import MismatchError, PeerLost, UserError, WorldError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
INTS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
UNSENT = (torch.bfloat16, torch.int16)
"""What Gloo cannot send."""
ALGORITHMS = ("gdraa", "ring", "halving_doubling", "hierarchical", "double_tree", "binomial", "parameter_server")


def data(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Return what a rank contributes: small whole numbers, so that sums are exact in every type."""
    return ((torch.arange(count) * 7 + rank * 3) % 5).to(dtype)


def expected(ranks: int, count: int, dtype: torch.dtype, op: str) -> torch.Tensor:
    every = torch.stack([data(rank, count, dtype) for rank in range(ranks)]).double()
    found = {"sum": every.sum(0), "avg": every.mean(0), "max": every.amax(0), "min": every.amin(0)}
    return found[op].to(dtype)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    ranks=st.integers(2, 6),
    count=st.one_of(st.integers(0, 70), st.sampled_from([1000, 4097])),
    dtype=st.sampled_from([*FLOATS, *INTS]),
    op=st.sampled_from(["sum", "avg", "max", "min"]),
    algorithm=st.sampled_from(ALGORITHMS),
    segments=st.integers(1, 3),
    in_arena=st.booleans(),
)
@pytest.mark.parametrize("transport", ["windows", "send_recv"])
def test_all_reduce_equals_the_plain_sum(
    transport: Transport,
    ranks: int,
    count: int,
    dtype: torch.dtype,
    op: str,
    algorithm: str,
    segments: int,
    in_arena: bool,
) -> None:
    if transport == "send_recv" and dtype in UNSENT:
        op, dtype = "sum", torch.float32

    def each(group: Group) -> torch.Tensor:
        tensor = group.empty(count, dtype) if in_arena else torch.empty(count, dtype=dtype)
        tensor.copy_(data(group.rank, count, dtype))
        group.all_reduce(tensor, op, choice=AlgorithmChoice(transport, algorithm, segments))
        return tensor.clone()

    for found in in_groups(ranks, each, with_gloo=transport == "send_recv"):
        assert torch.equal(found, expected(ranks, count, dtype, op))


@pytest.mark.parametrize("transport", ["windows", "send_recv", "c10d"])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8])
def test_average_of_integers_is_rounded_towards_zero_as_with_nccl(dtype: torch.dtype, transport: Transport) -> None:
    def each(group: Group) -> list[int]:
        tensor = torch.tensor([-7, -4, -1, 0, 1, 4, 7], dtype=dtype) + group.rank
        group.all_reduce(tensor, "avg", choice=AlgorithmChoice(transport, "gdraa"))
        averages: list[int] = tensor.tolist()
        return averages

    # The sums are -13, -7, -1, 1, 3, 9, 15.
    assert in_groups(2, each, with_gloo=transport != "windows") == [[-6, -3, 0, 0, 1, 4, 7]] * 2


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    weights=st.lists(st.integers(0, 5), min_size=2, max_size=5).filter(any),
    count=st.integers(0, 300),
    algorithm=st.sampled_from(["gdraa", "ring"]),
    in_arena=st.booleans(),
)
@pytest.mark.parametrize("transport", ["windows", "send_recv"])
def test_reduce_scatter_and_all_gather_with_uneven_shares(
    transport: Transport, weights: list[int], count: int, algorithm: str, in_arena: bool
) -> None:
    shares, ranks = Shares.of(weights), len(weights)
    choice = AlgorithmChoice(transport, algorithm)
    total = expected(ranks, count, torch.float64, "sum")

    def each(group: Group) -> None:
        tensor = group.empty(count, torch.float64) if in_arena else torch.empty(count, dtype=torch.float64)
        tensor.copy_(data(group.rank, count, torch.float64))
        group.reduce_scatter(tensor, shares=shares, choice=choice)
        mine = group.part(count, shares)
        assert torch.equal(tensor[mine.start : mine.stop], total[mine.start : mine.stop])
        kept = tensor[mine.start : mine.stop].clone()
        group.barrier()
        tensor.fill_(-1)
        tensor[mine.start : mine.stop] = kept
        group.all_gather(tensor, shares=shares, choice=choice)
        assert torch.equal(tensor, total)

    in_groups(ranks, each, with_gloo=transport == "send_recv")


@pytest.mark.parametrize("weights", [[3, 1], [5, 0, 1], [1, 1, 1], [0, 0, 7, 3]])
@pytest.mark.parametrize("algorithm", ["gdraa", "ring"])
def test_large_and_uneven_shards_are_staged_in_chunks(
    monkeypatch: pytest.MonkeyPatch, algorithm: str, weights: list[int]
) -> None:
    monkeypatch.setitem(CHUNK_BYTES, "host", 4096)
    count, shares, ranks = 10_007, Shares.of(weights), len(weights)
    choice, total = AlgorithmChoice("windows", algorithm), expected(ranks, count, torch.float64, "sum")

    def each(group: Group) -> tuple[torch.Tensor, torch.Tensor]:
        before = group.largest_free_bytes()
        tensor = data(group.rank, count, torch.float64)
        group.reduce_scatter(tensor, shares=shares, choice=choice)
        mine = group.part(count, shares)
        gathered = torch.full_like(tensor, -1)
        gathered[mine.start : mine.stop] = tensor[mine.start : mine.stop]
        group.all_gather(gathered, shares=shares, choice=choice)
        assert before - group.largest_free_bytes() < 5 * 4096  # a full arena would do
        return tensor[mine.start : mine.stop], gathered

    found = in_groups(ranks, each)
    assert torch.equal(torch.cat([part for part, _ in found]), total)
    assert all(torch.equal(gathered, total) for _, gathered in found)


@pytest.mark.parametrize("transport", ["windows", "send_recv"])
@pytest.mark.parametrize("root", [0, 2])
@pytest.mark.parametrize("algorithm", ["gdraa", "ring", "binomial"])
def test_broadcast_copies_the_root_to_all_ranks(root: int, algorithm: str, transport: Transport) -> None:
    def each(group: Group) -> torch.Tensor:
        tensor = data(group.rank, 999, torch.float32)
        group.broadcast(tensor, root, choice=AlgorithmChoice(transport, algorithm))
        return tensor

    found = in_groups(4, each, with_gloo=transport == "send_recv")
    assert all(torch.equal(each, data(root, 999, torch.float32)) for each in found)


def test_tensors_larger_than_a_chunk_and_of_any_stride() -> None:
    rows, columns = 700, 2 * CHUNK_BYTES["host"] // 4 // 700 + 3

    def each(group: Group) -> torch.Tensor:
        tensor = data(group.rank, rows * columns, torch.float32).view(columns, rows).t()
        group.all_reduce(tensor)
        assert not tensor.is_contiguous()
        return tensor.t().reshape(-1)

    for found in in_groups(3, each):
        assert torch.equal(found, expected(3, rows * columns, torch.float32, "sum"))


def test_low_precision_sums_are_rounded_once_per_round() -> None:
    """256 + 1 + 1 + ... in bfloat16 stays 256 if every addition is rounded."""

    def each(group: Group) -> torch.Tensor:
        tensor = torch.full((64,), 256.0 if group.rank == 0 else 1.0, dtype=torch.bfloat16)
        group.all_reduce(tensor)
        return tensor

    for found in in_groups(5, each):
        assert (found == 260).all()


def test_float64_sums_are_exact_over_many_steps_in_place() -> None:
    """The same slot again and again, without a barrier between: nobody overwrites what a peer still reads."""

    def each(group: Group) -> None:
        tensor = group.empty(5000, torch.float64)
        placed = group.endpoint.arenas["host"].slot_of(tensor)
        assert placed
        generator = torch.Generator().manual_seed(1)
        for step in range(200):
            parts = torch.rand(group.world_size, 5000, dtype=torch.float64, generator=generator)
            placed[0].wait_readers()
            tensor.copy_(parts[group.rank])
            group.all_reduce(tensor, choice=AlgorithmChoice("windows", "gdraa", 1 + step % 4))
            assert (tensor - parts.sum(0)).abs().max() < 1e-10

    in_groups(4, each)


def test_collectives_run_while_the_caller_computes() -> None:
    def each(group: Group) -> None:
        tensors = [torch.full((1000,), float(group.rank + index)) for index in range(20)]
        works = [group.all_reduce(tensor, wait=False) for tensor in tensors]
        for index, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
            work.wait(10)
            assert (tensor == 3 * index + 3).all()

    in_groups(3, each)


@pytest.mark.parametrize(
    ("counts", "dtypes", "ops"),
    [
        ((10, 11, 10), (torch.float32,) * 3, ("sum",) * 3),
        ((10, 10, 10), (torch.float32, torch.float32, torch.float64), ("sum",) * 3),
        ((10, 10, 10), (torch.float32,) * 3, ("sum", "max", "sum")),
    ],
)
def test_a_mismatch_is_named_on_every_rank(
    counts: tuple[int, ...], dtypes: tuple[torch.dtype, ...], ops: tuple[str, ...]
) -> None:
    def each(group: Group) -> str:
        def call() -> None:
            group.all_reduce(torch.ones(counts[group.rank], dtype=dtypes[group.rank]), ops[group.rank])
            group.barrier()

        with pytest.raises(MismatchError) as caught:
            call()
        return str(caught.value)

    for text in in_groups(3, each, timeout_s=10):
        assert "ranks disagree at call number 1: rank" in text
        assert text.count("on here asks for") == 1
        assert str(counts[1]) in text


def test_calls_in_another_order_are_named_on_every_rank() -> None:
    def each(group: Group) -> None:
        call = group.broadcast if group.rank == 1 else group.all_reduce
        with pytest.raises(MismatchError, match="broadcast"):
            call(torch.ones(4))

    in_groups(2, each, timeout_s=10)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda group: group.all_reduce(torch.ones(2), "product"), "use sum, avg, max, min"),
        (lambda group: group.all_reduce(torch.ones(2, dtype=torch.complex64)), "use float32"),
        (lambda group: group.broadcast(torch.ones(2), 2), "use 0 to 1"),
        (lambda group: group.all_gather(torch.ones(2), shares=Shares.equal(3)), "give one for each rank"),
        (lambda group: group.empty(1 << 60), "set MIMATRIX_ARENA"),
    ],
)
def test_invalid_arguments_are_refused_with_the_fix(call: object, sentence: str) -> None:
    def each(group: Group) -> None:
        with pytest.raises(UserError, match=sentence):
            call(group)  # type: ignore[operator]
        group.barrier()

    in_groups(2, each)


def test_every_algorithm_of_the_catalog_runs() -> None:
    """Whatever `verify` proves the executor runs: here by name, with its own collectives."""
    from mimatrix.collectives import CATALOG

    names = [(entry.name, kind) for entry in CATALOG.values() for kind in entry.collectives if entry.name != "hdrm"]
    in_order = ("gdraa", "ring", "two_level", "hierarchical")  # within one host, hierarchies have one level

    def each(group: Group) -> None:
        for name, kind in names:
            tensor = data(group.rank, 103, torch.float64)
            choice = AlgorithmChoice("windows", name)
            total = expected(4, 103, torch.float64, "sum")
            match kind:
                case Collective.ALL_REDUCE:
                    group.all_reduce(tensor, choice=choice)
                    assert torch.equal(tensor, total), name
                case Collective.BROADCAST:
                    group.broadcast(tensor, choice=choice)
                    assert torch.equal(tensor, data(0, 103, torch.float64)), name
                case Collective.REDUCE_SCATTER if name in in_order:
                    group.reduce_scatter(tensor, choice=choice)
                    mine = group.part(103)
                    assert torch.equal(tensor[mine.start : mine.stop], total[mine.start : mine.stop]), name
                case Collective.ALL_GATHER if name in in_order:
                    group.all_gather(tensor, choice=choice)
                case Collective.REDUCE_SCATTER | Collective.ALL_GATHER:
                    with pytest.raises(UserError, match="use gdraa or ring"):
                        group.reduce_scatter(tensor, choice=choice)

    in_groups(4, each)


def test_a_tensor_in_the_arena_may_be_written_after_each_call() -> None:
    """A fast rank that goes on at once must not change what a slow peer still reads."""

    def each(group: Group) -> int:
        tensor, wrong = group.empty(400_000), 0
        for step in range(30):
            tensor.fill_(float(step + group.rank))
            group.all_reduce(tensor, choice=AlgorithmChoice("windows", "gdraa", 1 + step % 3))
            wrong += int((tensor != group.world_size * step + 3).sum())
        group.free(tensor)
        return wrong

    assert in_groups(3, each) == [0, 0, 0]


def test_a_rank_that_fails_within_a_collective_is_named_and_leaves_no_wrong_sum(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its counter would otherwise go on with the next call, and peers take that for the end of this one."""
    from mimatrix.comm.execution import one_sided as executor
    from mimatrix.comm.execution import reduce as arithmetic

    whole = arithmetic.reduce_into

    def failing(target: torch.Tensor, *rest: object) -> None:
        if threading.current_thread().name == "0":
            raise ValueError("no more")
        whole(target, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(executor, "reduce_into", failing)

    def each(group: Group) -> str:
        threading.current_thread().name = str(group.rank)
        call = ValueError if group.rank == 0 else PeerLost
        with pytest.raises(call) as caught:
            group.all_reduce(torch.ones(100), choice=AlgorithmChoice("windows", "gdraa"))
        with pytest.raises(WorldError, match="broken: .* no more" if group.rank == 0 else "failed in .* no more"):
            group.all_reduce(torch.ones(100), choice=AlgorithmChoice("windows", "gdraa"))
        return str(caught.value)

    _, *others = in_groups(3, each, timeout_s=10)
    assert all("rank 0 on here failed in all_reduce of 100" in text for text in others)


def test_mismatched_roots_and_shares_are_named() -> None:
    def each(group: Group) -> None:
        def call() -> None:
            for _ in range(4):  # who only gives looks back when it uses the same stage again
                group.broadcast(torch.ones(4), group.rank)

        with pytest.raises(MismatchError, match="broadcast from 1 of 4"):
            call()

    def other(group: Group) -> None:
        with pytest.raises(MismatchError, match="other shares"):
            group.all_gather(
                torch.ones(4), shares=Shares.of([1, 1 + group.rank]), choice=AlgorithmChoice("windows", "gdraa")
            )

    in_groups(2, each, timeout_s=10)
    in_groups(2, other, timeout_s=10)


def test_parameters_that_require_grad_are_reduced() -> None:
    def each(group: Group) -> torch.Tensor:
        tensor = torch.ones(50, requires_grad=True)
        group.all_reduce(tensor)
        group.broadcast(tensor)
        return tensor.detach()

    assert all((found == 2).all() for found in in_groups(2, each))
