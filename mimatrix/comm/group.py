"""A group of ranks that run collectives together: the whole job, or a part of it."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist

from mimatrix.collectives.schedule import Collective
from mimatrix.collectives.shares import Shares
from mimatrix.comm.availability import TransportFacts, TransportStatus, describe_transports
from mimatrix.comm.c10d import C10dBackend
from mimatrix.comm.calls import DTYPES, REDUCE_OPS, CallCounters, CollectiveOp
from mimatrix.comm.dispatch import Dispatcher
from mimatrix.comm.endpoint import Endpoint
from mimatrix.comm.launched_calls import LaunchedCalls
from mimatrix.comm.memory.shared_storage import fills_storage
from mimatrix.comm.out_of_place import OutOfPlace
from mimatrix.comm.queued_calls import QueuedCalls, WatchedCall
from mimatrix.comm.tuning.choice import C10D, AlgorithmChoice, Transport, default_choice
from mimatrix.comm.tuning.tuner import SizeClass, Tuner
from mimatrix.comm.work import CollectiveThread, StreamWork, Work
from mimatrix.core.errors import UserError


class Group:
    """Some ranks of a job, as one of them sees them. Every member creates it with the same name and members."""

    def __init__(
        self,
        name: str,
        dispatcher: Dispatcher,
        tuner: Tuner | None,
        thread: CollectiveThread,
        *,
        nccl_reason: str = "",
    ) -> None:
        self.name, self.tuner = name, tuner
        self._dispatcher, self._windows = dispatcher, dispatcher.windows
        self.endpoint, self.members = dispatcher.endpoint, dispatcher.members
        self.rank, self.world_size = dispatcher.rank, dispatcher.world_size
        self.sync, self.forecast = dispatcher.sync, dispatcher.forecast
        self.backends, self.cpu_backend = dispatcher.backends, dispatcher.cpu_backend
        self.nccl_reason = nccl_reason
        """Why there is no NCCL, if the group's c10d backends are without it."""
        self.caller = self.endpoint.control.caller
        counters = CallCounters()
        self.counters, self.bytes_moved = counters.calls, counters.bytes_moved
        self.queue = QueuedCalls(name, dispatcher, thread, counters)
        self._launched = (
            LaunchedCalls(name, dispatcher, dispatcher.nccl, counters, self.queue.watch) if dispatcher.nccl else None
        )

    @classmethod
    def create(
        cls,
        endpoint: Endpoint,
        name: str,
        members: Sequence[int],
        *,
        backends: Mapping[str, C10dBackend] | None = None,
        nccl_reason: str = "",
        timeout_s: float = 300.0,
        tune: bool = True,
        lazy_release: bool = False,
        own_thread: bool = False,
    ) -> "Group":
        """Open the windows of all members and return once every member has done so.

        Args:
            endpoint: This rank's end of the job.
            name: The same on all members, and different for every group of the job.
            members: The ranks of the job that belong to the group.
            backends: c10d backends by device type; `cpu` is among them if there are any.
            nccl_reason: Why NCCL is not among them, for `transport_status`.
            timeout_s: Seconds after which a member that does not come counts as lost.
            tune: Measure which algorithm is fastest. Without `backends` all collectives run over windows.
            lazy_release: Let calls on tensors in the arena return while peers may still read them. Call
                `wait_readers` before writing to such a tensor.
            own_thread: Run this group's collectives on a thread of their own; see `QueuedCalls.use_own_thread`.
        """
        backends = dict(backends or {})
        dispatcher = Dispatcher.open(endpoint, name, members, backends, timeout_s=timeout_s, lazy_release=lazy_release)
        tuner = Tuner.load(dispatcher, name) if backends and tune else None
        group = cls(name, dispatcher, tuner, endpoint.thread, nccl_reason=nccl_reason)
        if dispatcher.nccl:
            backend = dispatcher.nccl.backend.backend
            endpoint.watchdog.watch(name, dispatcher.members, backend, dispatcher.launch_log, timeout_s)
        if own_thread:
            group.queue.use_own_thread()
        # No member may finish and leave before all have opened its windows.
        group.barrier()
        return group

    @property
    def has_nccl(self) -> bool:
        """Whether NCCL carries the c10d collectives of GPUs."""
        return self._dispatcher.nccl is not None

    @property
    def transports(self) -> tuple[Transport, ...]:
        """The transports that can carry data here."""
        return self._dispatcher.transports

    def transport_status(self) -> tuple[TransportStatus, ...]:
        """Return which transports the group has for which device, and why not the others; the same on all ranks."""
        locations = [self.endpoint.locations[rank] for rank in self.members]
        facts = TransportFacts(
            members=self.members,
            hosts=[location.host for location in locations],
            has_gpu=[location.has_gpu for location in locations],
            peer_access=self.endpoint.peer_access,
            has_remote_windows=all("remote" in location.windows for location in locations),
            has_gloo=self.cpu_backend is not None,
            nccl_reason=self.nccl_reason,
        )
        return describe_transports(facts)

    @property
    def has_windows(self) -> bool:
        """Whether ranks can read each other's memory."""
        return bool(self._windows.window_kinds)

    @property
    def window_kinds(self) -> tuple[str, ...]:
        """The kinds of windows over which all members reach each other: `host`, `cuda`, `remote`."""
        return self._windows.window_kinds

    @property
    def maps_peers(self) -> bool:
        """Whether ranks map each other's host memory."""
        return "host" in self._windows.window_kinds

    def empty(self, count: int, dtype: torch.dtype = torch.float32, kind: str = "host") -> torch.Tensor:
        """Return a tensor in the arena: collectives on it, or on parts of it, need no staging."""
        return self.endpoint.arenas[kind].allocate(count * dtype.itemsize).tensor(dtype, count)

    def free(self, tensor: torch.Tensor) -> None:
        """Return a tensor from `empty` to the arena once peers have read it."""
        if placed := self._windows.find_slot(tensor):
            placed[1].free()

    def wait_readers(self, tensor: torch.Tensor) -> None:
        """Wait until peers have read a tensor in the arena; only needed after a call with `lazy_release`."""
        if placed := self._windows.find_slot(tensor):
            placed[1].wait_readers()

    def largest_free_bytes(self, kind: str = "host") -> int:
        """Return the size of the largest tensor that the arena has room for now."""
        return self.endpoint.arenas[kind].largest_free_bytes

    def allocate_staging(self, kind: str = "host") -> None:
        """Allocate the staging slots now, before the arena fills up, instead of at their first use."""
        self._windows.allocate_staging(kind)

    def window_kind(self, tensor: torch.Tensor) -> str:
        """Return the kind of window for a tensor: its GPU's if all ranks have one, otherwise the host's."""
        return self._windows.window_kind(tensor)

    def arena_offset(self, tensor: torch.Tensor) -> int | None:
        """Return the offset of a tensor in the host arena, for peers that read it there; None if it is elsewhere."""
        placed = self._windows.find_slot(tensor)
        return placed[2] if placed and placed[0] == "host" else None

    def peer_tensor(self, member: int, offset: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor over a member's host arena, which shows what is there at any time. Only read it."""
        return self._windows.view_peer(member, offset, offset + count * dtype.itemsize, dtype)

    def all_reduce(
        self, tensor: torch.Tensor, op: str = "sum", *, choice: AlgorithmChoice | None = None, wait: bool = True
    ) -> Work:
        """Reduce a tensor over all members, in place: `op` is sum, avg, max or min."""
        return self._run(CollectiveOp(Collective.ALL_REDUCE, tensor.dtype, op), tensor, choice, wait)

    def reduce_scatter(
        self,
        tensor: torch.Tensor,
        op: str = "sum",
        *,
        shares: Shares | None = None,
        choice: AlgorithmChoice | None = None,
        wait: bool = True,
    ) -> Work:
        """Reduce this rank's shard of `tensor`, cut by `shares`, in place; the other shards become undefined."""
        return self._run(CollectiveOp(Collective.REDUCE_SCATTER, tensor.dtype, op, shares), tensor, choice, wait)

    def all_gather(
        self,
        tensor: torch.Tensor,
        *,
        shares: Shares | None = None,
        choice: AlgorithmChoice | None = None,
        wait: bool = True,
    ) -> Work:
        """Fill `tensor` with the shards of all members, cut by `shares`; this rank's is there already."""
        return self._run(CollectiveOp(Collective.ALL_GATHER, tensor.dtype, "sum", shares), tensor, choice, wait)

    def broadcast(
        self, tensor: torch.Tensor, root: int = 0, *, choice: AlgorithmChoice | None = None, wait: bool = True
    ) -> Work:
        """Copy the tensor of member `root` to all members."""
        return self._run(CollectiveOp(Collective.BROADCAST, tensor.dtype, "sum", root=root), tensor, choice, wait)

    def barrier(self) -> None:
        """Wait until every member has called this."""
        self.start_barrier(wait=True).wait()

    def start_barrier(self, *, wait: bool) -> Work:
        """Start a barrier and return its work; with `wait` it may run on the calling thread."""
        op = CollectiveOp(Collective.BROADCAST, torch.uint8)
        choice = AlgorithmChoice("windows", "barrier")
        return self.queue.submit(
            partial(self._dispatcher.check_same_call, op, 0, choice), doing="a barrier", inline=wait
        )

    def part(self, count: int, shares: Shares | None = None, member: int | None = None) -> range:
        """Return the elements of a tensor of `count` that a member (by default this rank) owns under `shares`."""
        sizes = (shares or Shares.equal(self.world_size)).cut(count)
        owner = self.rank if member is None else member
        return range(sum(sizes[:owner]), sum(sizes[: owner + 1]))

    def start(
        self, op: CollectiveOp, tensor: torch.Tensor, choice: AlgorithmChoice | None = None, *, may_run_here: bool
    ) -> Work:
        """Start a collective in place on a tensor, by `choice` or as tuned.

        With `may_run_here` it may run on the calling thread, which then cannot overlap with it. What NCCL carries is
        launched on the calling thread in any case, so that every rank launches in the order of its program.
        """
        if choice is None and (launched := self.launch_known(op, tensor, is_async=not may_run_here)):
            return StreamWork.of(launched)
        self._check(op, tensor)
        choice = choice or self.cached_choice(op, tensor) or self._choose_if_launched(op, tensor)
        if choice and self._launched and self.launches(tensor, choice):
            self.queue.agree_to_launch(op, tensor)
            return self._launched.start(op, tensor, choice)
        if op.is_bucket and choice and choice.transport == "windows" and fills_storage(tensor):
            self._windows.share_storage(tensor)

        watched = WatchedCall(self.caller.of_this_thread())

        def task() -> None:
            chosen = choice or self.choose(op, tensor)
            self.queue.begin(op, tensor, chosen, watched)
            self._dispatcher.execute(op, tensor, chosen)

        inline = may_run_here and _is_interruptible(choice)
        return self.queue.submit(task, tensor, doing=op.describe(tensor.numel()), inline=inline, watched=watched)

    def start_into(self, call: OutOfPlace, *, may_run_here: bool) -> Work:
        """Start a collective between two tensors, as tuned; `may_run_here` as in `start`."""
        op, full, shard = call.op, call.full, call.shard
        if full.numel() != shard.numel() * self.world_size:
            raise UserError(
                f"{op.collective.value} between {shard.numel()} elements on each of {self.world_size} ranks and "
                f"{full.numel()} of all; give the larger tensor {shard.numel() * self.world_size}"
            )
        self._check(op, full)
        choice = self.cached_choice(op, full) or self._choose_if_launched(op, full)
        if choice and self._launched and self.launches(full, choice):
            self.queue.agree_to_launch(op, full)
            return self._launched.start_into(call, choice)

        watched = WatchedCall(self.caller.of_this_thread())

        def task() -> None:
            chosen = choice or self.choose(op, full)
            self.queue.begin(op, full, chosen, watched)
            self._dispatcher.execute_into(call, chosen)

        inline = may_run_here and _is_interruptible(choice)
        return self.queue.submit(task, call.output, doing=op.describe(full.numel()), inline=inline, watched=watched)

    def launch_known(self, op: CollectiveOp, *tensors: torch.Tensor, is_async: bool = True) -> dist.Work | None:
        """Launch a collective that NCCL is known to carry; None if that is not known yet, so that `start` finds out.

        `tensors` are one, or the full tensor and the shard of a call between two. Without `is_async` the caller's
        stream runs it, since it would wait for it at once.
        """
        return self._launched.start_known(op, *tensors, is_async=is_async) if self._launched else None

    def launches(self, tensor: torch.Tensor, choice: AlgorithmChoice | None = None) -> bool:
        """Return whether a GPU orders what carries a tensor: NCCL is there and, if it is given, by `choice`."""
        return self.world_size > 1 and self._dispatcher.launches(tensor, choice or C10D)

    def launch_native(self, launch: Callable[[], dist.Work | None], tensor: torch.Tensor, *, doing: str) -> StreamWork:
        """Launch a call of NCCL that is not one of ours, in the order of this program."""
        assert self._launched
        return self._launched.start_native(launch, tensor, doing=doing)

    def _choose_if_launched(self, op: CollectiveOp, tensor: torch.Tensor) -> AlgorithmChoice | None:
        """Measure now, on the group's thread, if NCCL may carry the call: it is launched here, in its order."""
        if not self.launches(tensor):
            return None
        return self.tune(op, tensor)

    def cached_choice(self, op: CollectiveOp, tensor: torch.Tensor) -> AlgorithmChoice | None:
        """Return the choice for a call, or None if it has to be measured first."""
        if self.world_size == 1:
            return C10D
        if self.tuner:
            return self.tuner.cached_choice(self.size_class(op, tensor))
        transport: Transport = "windows" if self.has_windows else "send_recv"
        size = tensor.nbytes if self._windows.find_slot(tensor) else 0
        return default_choice(op.collective, size, self.world_size, transport)

    def choose(self, op: CollectiveOp, tensor: torch.Tensor) -> AlgorithmChoice:
        """Return the choice for a call; measure it at the first call of its size. Only on the group's thread."""
        choice = self.cached_choice(op, tensor)
        if choice is None:
            assert self.tuner
            # The real call first: otherwise ranks that disagree would complain about the tuner's sizes.
            self._dispatcher.check_same_call(op, tensor.numel(), AlgorithmChoice("windows", "to be measured"))
            choice = self.tuner.choose(self.size_class(op, tensor), op.shares)
        return choice

    def tune(self, op: CollectiveOp, tensor: torch.Tensor) -> AlgorithmChoice:
        """Return the choice for calls on such a tensor; measure it now if it was not measured before. A collective."""
        choice = self.cached_choice(op, tensor)
        if choice is None:
            choices: list[AlgorithmChoice] = []
            doing = f"measuring {op.describe(tensor.numel())}"
            self.queue.submit(lambda: choices.append(self.choose(op, tensor)), tensor, doing=doing, inline=False).wait()
            choice = choices[0]
        if self.launches(tensor, choice):
            self.queue.agree_to_launch(op, tensor)
        return choice

    def restrict_gpus(self, *, windows: bool | None) -> None:
        """Have windows carry all tensors of GPUs from now on, or none; None: whatever is fastest. All members agree."""
        if self.tuner:
            self.tuner.restrict_gpus(windows=windows)

    def tuned_s(self, op: CollectiveOp, tensor: torch.Tensor, *, windows: bool) -> float:
        """Return the shortest time measured for such calls over windows, or without; infinite if none was."""
        return self.tuner.fastest_s(self.size_class(op, tensor), windows=windows) if self.tuner else float("inf")

    def size_class(self, op: CollectiveOp, tensor: torch.Tensor) -> SizeClass:
        """Return the class of messages with which this one is tuned."""
        placed = self._windows.find_slot(tensor)
        window_kind = placed[0] if placed else self.window_kind(tensor)
        # A GPU tensor on one rank may be a CPU tensor on another, and all ranks must tune at the same moment.
        device = "cpu" if self._dispatcher.has_mixed_devices else tensor.device.type
        counts = (op.shares or Shares.equal(self.world_size)).cut(tensor.numel())
        carriers = self._dispatcher.carriers(op.collective, device, tensor.dtype)
        is_placed = placed is not None
        return SizeClass.of(op.collective, tensor, window_kind, device, carriers, is_placed=is_placed, counts=counts)

    def close(self) -> None:
        """Release the staging slots after the calls that are queued, and end the group's own thread."""
        self.endpoint.watchdog.forget(self.name)
        self.queue.close()

    def _run(self, op: CollectiveOp, tensor: torch.Tensor, choice: AlgorithmChoice | None, wait: bool) -> Work:
        work = self.start(op, tensor, choice, may_run_here=wait)
        if wait:
            work.wait()
        return work

    def _check(self, op: CollectiveOp, tensor: torch.Tensor) -> None:
        """Refuse invalid arguments before any rank waits for another."""
        if op.reduce_op not in REDUCE_OPS:
            raise UserError(f'unknown reduction "{op.reduce_op}"; use {", ".join(REDUCE_OPS)}')
        if tensor.dtype not in DTYPES:
            raise UserError(f"tensors of {tensor.dtype} cannot be reduced; use float32 or another common type")
        if op.shares and len(op.shares) != self.world_size:
            raise UserError(f"got {len(op.shares)} shares for {self.world_size} ranks; give one for each rank")
        if not 0 <= op.root < self.world_size:
            raise UserError(f"the root is member {op.root} of {self.world_size}; use 0 to {self.world_size - 1}")


def _is_interruptible(choice: AlgorithmChoice | None) -> bool:
    """Whether a call may run on the thread that waits for it: c10d and measurements cannot be interrupted."""
    return choice is not None and choice.transport == "windows"
