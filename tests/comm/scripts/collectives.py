"""Every collective of torch.distributed on `mimatrix`, against the same on Gloo in the same processes."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from forks import forked, joined, require, say, world

from mimatrix.comm.tuning.choice import C10D, AlgorithmChoice

RANKS = 3
Results = list[torch.Tensor]
Case = Callable[[Any], Results]
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
WHOLE = (torch.int64, torch.int32, torch.uint8)
SHAPES: tuple[tuple[int, ...], ...] = ((0,), (), (1,), (7,), (4, 5), (300, 111))


def data(shape: tuple[int, ...] = (6,), dtype: torch.dtype = torch.float32, *, of: int | None = None) -> torch.Tensor:
    """Return what a rank (by default this one) brings: small whole numbers, so that every order sums to the same."""
    rank = dist.get_rank() if of is None else of
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 7 + rank * 3) % 5 + 1).to(dtype).view(shape)


def is_gloo(group: Any) -> bool:
    return str(dist.get_backend(group)) == "gloo"


def done(work: dist.Work | None) -> None:
    assert work
    work.wait()


def strided() -> torch.Tensor:
    """Neither contiguous nor dense."""
    return data((8, 10)).t()[::2]


def all_reduce(op: Any, dtype: torch.dtype, shape: tuple[int, ...] = (6,), *, beside: bool = False) -> Case:
    def case(group: Any) -> Results:
        tensor = data(shape, dtype)
        work = dist.all_reduce(tensor, op, group, async_op=beside)
        if beside:
            done(work)
        return [tensor]

    return case


def average_of_integers(dtype: torch.dtype) -> Case:
    """Gloo has none: it is compared with the sum divided and rounded towards zero, as NCCL does it."""

    def case(group: Any) -> Results:
        tensor = (data((7,), dtype) - 3) * 5  # of uint8, some wrap around
        dist.all_reduce(tensor, dist.ReduceOp.SUM if is_gloo(group) else dist.ReduceOp.AVG, group)
        return [torch.div(tensor, RANKS, rounding_mode="trunc") if is_gloo(group) else tensor]

    return case


def average_scattered(group: Any) -> Results:
    op, part = dist.ReduceOp.SUM if is_gloo(group) else dist.ReduceOp.AVG, torch.zeros(2, 3, dtype=torch.int64)
    dist.reduce_scatter_tensor(part, (data((RANKS * 2, 3), torch.int64) - 3) * 5, op, group=group)
    return [torch.div(part, RANKS, rounding_mode="trunc") if is_gloo(group) else part]


def all_reduce_strided(group: Any) -> Results:
    tensor = strided().contiguous() if is_gloo(group) else strided()  # Gloo sums the wrong ones
    dist.all_reduce(tensor, group=group)
    return [tensor]


def reduce(group: Any) -> Results:
    tensor = data()
    dist.reduce(tensor, 1, group=group)
    return [tensor] if dist.get_rank() == 1 else []


def broadcast(dtype: torch.dtype, shape: tuple[int, ...], root: int) -> Case:
    def case(group: Any) -> Results:
        tensor = data(shape, dtype)
        dist.broadcast(tensor, root, group=group)
        return [tensor]

    return case


def broadcast_strided(group: Any) -> Results:
    tensor = data((8, 10)).t()
    dist.broadcast(tensor, 2, group=group)
    return [tensor]


def all_gather(dtype: torch.dtype, shape: tuple[int, ...]) -> Case:
    def case(group: Any) -> Results:
        found = [torch.zeros(shape, dtype=dtype) for _ in range(RANKS)]
        dist.all_gather(found, data(shape, dtype), group=group)
        return found

    return case


def all_reduce_sparse(group: Any) -> Results:
    tensor = data((6,)).to_sparse()
    dist.all_reduce(tensor, group=group)
    return [tensor.to_dense()]


def all_gather_single(dtype: torch.dtype, rows: int, width: int) -> Case:
    def case(group: Any) -> Results:
        stacked, behind = torch.zeros(RANKS, rows, width, dtype=dtype), torch.zeros(RANKS * rows, width, dtype=dtype)
        # Gloo gathers only into what lies behind one another.
        into = stacked.view(behind.shape) if is_gloo(group) else stacked
        dist.all_gather_into_tensor(into, data((rows, width), dtype), group=group)
        done(dist.all_gather_into_tensor(behind, data((rows, width), dtype), group=group, async_op=True))
        return [stacked, behind]

    return case


def reduce_scatter(group: Any) -> Results:
    found = torch.zeros(5)
    dist.reduce_scatter(found, [data((5,)) + index for index in range(RANKS)], group=group)
    return [found]


def reduce_scatter_single(dtype: torch.dtype, rows: int, width: int, op: Any = dist.ReduceOp.SUM) -> Case:
    def case(group: Any) -> Results:
        at_once, beside = torch.zeros(rows, width, dtype=dtype), torch.zeros(rows, width, dtype=dtype)
        dist.reduce_scatter_tensor(at_once, data((RANKS * rows, width), dtype), op, group=group)
        source = data((RANKS * rows, width) if is_gloo(group) else (RANKS, rows, width), dtype)
        done(dist.reduce_scatter_tensor(beside, source, op, group=group, async_op=True))
        return [at_once, beside]

    return case


def all_to_all(group: Any) -> Results:
    if is_gloo(group):  # Gloo has only the other one
        return [data((2,), of=index) + dist.get_rank() for index in range(RANKS)]
    found = [torch.zeros(2) for _ in range(RANKS)]
    dist.all_to_all(found, [data((2,)) + index for index in range(RANKS)], group=group)
    return found


def all_to_all_single(group: Any) -> Results:
    even, uneven = torch.zeros(6), torch.zeros(RANKS * (dist.get_rank() + 1))
    dist.all_to_all_single(even, data(), group=group)
    sent = [index + 1 for index in range(RANKS)]
    dist.all_to_all_single(uneven, data((6,)), [dist.get_rank() + 1] * RANKS, sent, group=group)
    return [even, uneven]


def gather(group: Any) -> Results:
    found = [torch.zeros(6) for _ in range(RANKS)] if dist.get_rank() == 2 else None
    dist.gather(data(), found, 2, group=group)
    return found or []


def scatter(group: Any) -> Results:
    found = torch.zeros(6)
    dist.scatter(found, [data() + index for index in range(RANKS)] if dist.get_rank() == 1 else None, 1, group=group)
    return [found]


def send_and_receive(group: Any) -> Results:
    rank, found, another = dist.get_rank(), torch.zeros(6), torch.zeros(6)
    if rank == 0:
        dist.send(data(), 1, group=group)
        done(dist.isend(data() + 1, 2, group=group, tag=3))
    elif rank == 1:
        assert dist.recv(found, group=group) == 0
    else:
        done(dist.irecv(found, 0, group=group, tag=3))
    ring = [
        dist.P2POp(dist.isend, data(), (rank + 1) % RANKS, group=group),
        dist.P2POp(dist.irecv, another, (rank - 1) % RANKS, group=group),
    ]
    for work in dist.batch_isend_irecv(ring):
        work.wait()
    return [found, another]


def objects(group: Any) -> Results:
    rank = dist.get_rank()
    every: list[Any] = [None] * RANKS
    dist.all_gather_object(every, {"rank": rank, "word": "a" * rank}, group=group)
    told = [f"from {rank}", rank]
    dist.broadcast_object_list(told, 1, group=group)
    given: list[Any] = [None]
    dist.scatter_object_list(given, ["x", "yy", "zzz"] if rank == 0 else None, 0, group=group)
    collected = [None] * RANKS if rank == 2 else None
    dist.gather_object(rank * 11, collected, 2, group=group)
    text = json.dumps([every, told, given, collected])
    return [torch.tensor(list(text.encode()))]


def coalesced(group: Any) -> Results:
    sums = [data((count,)) for count in (3, 1, 40)]
    if is_gloo(group):  # Gloo cannot gather and scatter so
        for tensor in sums:
            dist.all_reduce(tensor, group=group)
    else:
        with dist._coalescing_manager(group):  # type: ignore[attr-defined]
            for tensor in sums:
                dist.all_reduce(tensor, group=group)
    parts, wholes = [data((2,)), data((5,))], [torch.zeros(2 * RANKS), torch.zeros(5 * RANKS)]
    scattered, sources = [torch.zeros(2), torch.zeros(5)], [data((2 * RANKS,)), data((5 * RANKS,))]
    if is_gloo(group):
        for whole, part in zip(wholes, parts, strict=True):
            dist.all_gather_into_tensor(whole, part, group=group)
        for into, source in zip(scattered, sources, strict=True):
            dist.reduce_scatter_tensor(into, source, group=group)
    else:
        with dist._coalescing_manager(group, async_ops=True) as manager:  # type: ignore[attr-defined]
            for whole, part in zip(wholes, parts, strict=True):
                dist.all_gather_into_tensor(whole, part, group=group)
        manager.wait()
        with dist._coalescing_manager(group):  # type: ignore[attr-defined]
            for into, source in zip(scattered, sources, strict=True):
                dist.reduce_scatter_tensor(into, source, group=group)
    return [*sums, *wholes, *scattered]


def functions(group: Any) -> Results:
    group = group or dist.group.WORLD
    pairs = [data((3, 2)), data((4,))]
    return [
        functional.all_reduce(data(), "sum", group) + 0,
        functional.all_gather_single(data((2, 3)), 1, group) + 0,
        functional.reduce_scatter_single(data((6, 2)), "sum", 0, group) + 0,
        *(each + 0 for each in functional.all_reduce_coalesced(pairs, "max", group)),
        functional.broadcast(data(), 1, group) + 0,
        functional.all_to_all_single(data(), None, None, group) + 0,
    ]


def cases() -> Iterator[tuple[str, Case]]:
    ops = dist.ReduceOp
    for dtype in (*FLOATS, *WHOLE):
        for op in (ops.SUM, ops.MAX, ops.MIN, ops.PRODUCT):
            yield f"all_reduce {dtype} {op}", all_reduce(op, dtype)
        yield f"all_gather {dtype}", all_gather(dtype, (6,))
        yield f"all_gather_single {dtype}", all_gather_single(dtype, 3, 4)
        yield f"reduce_scatter_single {dtype}", reduce_scatter_single(dtype, 3, 4)
        yield f"broadcast {dtype}", broadcast(dtype, (6,), 1)
    for dtype in WHOLE:
        yield f"all_reduce {dtype} band", all_reduce(ops.BAND, dtype)
        yield f"all_reduce {dtype} avg", average_of_integers(dtype)
    for shape in SHAPES:
        yield f"all_reduce {shape}", all_reduce(ops.SUM, torch.float32, shape)
        yield f"all_reduce beside {shape}", all_reduce(ops.SUM, torch.float64, shape, beside=True)
        yield f"broadcast {shape}", broadcast(torch.float32, shape, 2)
        yield f"all_gather {shape}", all_gather(torch.float32, shape)
    yield "all_reduce max bool", all_reduce(ops.MAX, torch.bool)
    yield "broadcast bool", broadcast(torch.bool, (6,), 1)
    yield "all_gather bool", all_gather(torch.bool, (6,))
    yield "all_gather_single bool", all_gather_single(torch.bool, 2, 2)
    yield "all_reduce avg", all_reduce(ops.AVG, torch.float64, (7,))
    yield "reduce_scatter_single avg", reduce_scatter_single(torch.float64, 2, 3, ops.AVG)
    yield "reduce_scatter_single max", reduce_scatter_single(torch.float32, 2, 3, ops.MAX)
    for rows, width in ((0, 4), (1, 1), (500, 333)):
        yield f"all_gather_single {rows}x{width}", all_gather_single(torch.float32, rows, width)
        yield f"reduce_scatter_single {rows}x{width}", reduce_scatter_single(torch.float32, rows, width)
    for case in (
        average_scattered,
        all_reduce_strided,
        reduce,
        broadcast_strided,
        all_reduce_sparse,
        reduce_scatter,
        all_to_all,
    ):
        yield case.__name__, case
    for case in (all_to_all_single, gather, scatter, send_and_receive, objects, coalesced, functions):
        yield case.__name__, case


def outcome(case: Case, group: Any) -> Results | str:
    try:
        return case(group)
    except Exception as error:  # noqa: BLE001 (both must refuse, or neither)
        return f"refused: {type(error).__name__}: {error}"


def alike(ours: Results | str, theirs: Results | str) -> bool:
    if isinstance(ours, str) or isinstance(theirs, str):
        return isinstance(ours, str) and isinstance(theirs, str)
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def on_path(choice: AlgorithmChoice | None) -> None:
    """Have everything take one path, as if the tuner had found it fastest."""
    if choice:
        world().mimatrix.tuner.cached_choice = lambda _: choice


def rank_alone(rank: int) -> None:
    """Run everything three times: as tuned, over windows, by c10d."""
    joined()
    gloo = dist.new_group(backend="gloo")
    expected = {name: outcome(case, gloo) for name, case in cases()}
    for choice in (None, AlgorithmChoice("windows", "gdraa"), C10D):
        on_path(choice)
        for name, case in cases():
            ours, theirs = outcome(case, None), expected[name]
            assert alike(ours, theirs), f"{name} on {choice}: {ours}, and on Gloo {theirs}"
    if rank == 0:
        say(world().counters)
    dist.destroy_process_group()


if __name__ == "__main__":
    require(forked(RANKS, rank_alone))
