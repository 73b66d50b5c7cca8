"""What only the first rank of a group does: it pushes to the shards, pulls from them, and copies them."""

import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

from mimatrix.core.errors import WorldError
from mimatrix.engine.outer_optimizer import PushStats
from mimatrix.hybrid.client.client import PulledParams, ShardsClient
from mimatrix.hybrid.client.consistent_cut import ConsistentCut
from mimatrix.hybrid.policy import Policy
from mimatrix.hybrid.server.shard import Hyperparameters
from mimatrix.hybrid.server.state import ShardState

_POLL_S = 0.005


@dataclass(frozen=True, kw_only=True)
class _PendingPush:
    """A push as it is handed to the thread that sends it."""

    gradient: torch.Tensor
    samples: int
    nominal_samples: int
    hyperparameters: list[Hyperparameters]
    base_versions: tuple[int, ...]
    without_grad: list[int]


class GroupLeader:
    """Pushes for its group, with at most one push in flight.

    Args:
        client: The shards, which this group has joined.
        pulled: What was pulled after joining.
        policy: When to wait for other groups.
        overlaps: Whether the group computes while a push is in flight.
        timeout_s: How long to wait for other groups.
    """

    def __init__(
        self, client: ShardsClient, pulled: PulledParams, policy: Policy, *, overlaps: bool, timeout_s: float
    ) -> None:
        self._client, self._policy = client, policy
        self._overlaps = overlaps and not policy.local_steps and not policy.scaling.pushes_per_step
        self._timeout_s = timeout_s
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mimatrix-push")
        self._in_flight: Future[PulledParams] | None = None
        self.pulled = pulled
        """What was pulled last."""
        self._waited_s = 0.0
        """How long the last push waited for other groups."""
        self.stats = PushStats()

    @classmethod
    def join(cls, client: ShardsClient, policy: Policy, *, overlaps: bool, timeout_s: float) -> "GroupLeader":
        """Join the shards and pull from them."""
        try:
            client.join()
            return cls(client, client.pull(), policy, overlaps=overlaps, timeout_s=timeout_s)
        except BaseException:
            client.close()
            raise

    def push_gradient(
        self,
        gradient: torch.Tensor,
        samples: int,
        nominal_samples: int,
        hyperparameters: list[Hyperparameters],
        without_grad: list[int],
    ) -> torch.Tensor:
        """Push a mean gradient and return the parameters to continue with.

        If pushes overlap with computing, these are the parameters of the push before.
        """
        base_versions = self.pulled.versions
        if self._in_flight:
            self.pulled = self._wait(self._in_flight)
        push = _PendingPush(
            gradient=gradient.clone(),
            samples=samples,
            nominal_samples=nominal_samples,
            hyperparameters=hyperparameters,
            base_versions=base_versions,
            without_grad=without_grad,
        )
        self._in_flight = self._thread.submit(self._push, push)
        if not self._overlaps:
            self.pulled, self._in_flight = self._wait(self._in_flight), None
        return self.pulled.values

    def push_distance(
        self, params: torch.Tensor, samples: int, nominal_samples: int, hyperparameters: list[Hyperparameters]
    ) -> torch.Tensor:
        """Push the distance to the common parameters as a gradient; return the parameters to continue with."""
        started_s, moving_rate = time.monotonic(), self._policy.moving_rate
        common = self.pulled if moving_rate == 1 else self._client.pull()
        distance = (common.values - params) * moving_rate
        self.pulled = self._push(
            _PendingPush(
                gradient=distance,
                samples=samples,
                nominal_samples=nominal_samples,
                hyperparameters=hyperparameters,
                base_versions=common.versions,
                without_grad=[],
            )
        )
        self._count_stall(time.monotonic() - started_s)
        return self.pulled.values if moving_rate == 1 else params + distance

    def flush(self) -> None:
        """Wait until the push in flight is applied."""
        if self._in_flight:
            self._in_flight.result()

    def copy_shards(self) -> ConsistentCut:
        """Let all servers copy their shards, with the same pushes applied; retry once if a shard moves meanwhile."""
        for attempt in range(2):
            try:
                with self._client.hold() as cut:
                    cut.copy()
                break
            except WorldError:
                if attempt:
                    raise
        return cut

    def fetch(self, cut: ConsistentCut) -> list[ShardState]:
        """Fetch the copies; if a server was lost with its copy, copy all shards again as they are by now."""
        try:
            return cut.fetch()
        except WorldError:
            return self.copy_shards().fetch()

    @property
    def shard_sizes(self) -> tuple[int, ...]:
        """The number of elements of each shard."""
        return self._client.sizes

    def load(self, states: list[ShardState]) -> bool:
        """Load a checkpoint into the shards unless they were trained since; return whether they are at it."""
        self.flush()
        self._in_flight = None
        with self._client.hold(self._timeout_s) as cut:
            is_loaded = cut.load(states)
        self._client.join()
        self.pulled = self._client.pull()
        return is_loaded

    def close(self) -> None:
        """Finish the push in flight, and leave."""
        self.flush()
        self._thread.shutdown()
        self._client.close()

    def _wait(self, in_flight: Future[PulledParams]) -> PulledParams:
        started_s = time.monotonic()
        pulled = in_flight.result()
        self._count_stall(time.monotonic() - started_s)
        return pulled

    def _count_stall(self, stalled_s: float) -> None:
        """Count the time that the group stood still for a push; part of it was waiting for other groups."""
        waited_s = min(stalled_s, self._waited_s)
        stats = self.stats
        self.stats = replace(stats, waited_s=stats.waited_s + waited_s, moved_s=stats.moved_s + stalled_s - waited_s)

    def _push(self, push: _PendingPush) -> PulledParams:
        result = self._client.push(
            push.gradient,
            push.samples,
            push.nominal_samples,
            push.hyperparameters,
            push.base_versions,
            push.without_grad,
        )
        pushed_s = time.monotonic()
        if self._policy.scaling.pushes_per_step:
            pulled = self._wait_for_step(result.pulled, push.base_versions)
        else:
            pulled = self._wait_for_slowest(result.pulled)
        self._waited_s = result.waited_s + time.monotonic() - pushed_s
        stats = self.stats
        self.stats = replace(
            stats, pushes=stats.pushes + 1, samples=stats.samples + push.samples, staleness=result.staleness
        )
        return pulled

    def _wait_for_step(self, pulled: PulledParams, base_versions: tuple[int, ...]) -> PulledParams:
        """Wait until enough groups have pushed on the same version."""
        started_s = time.monotonic()
        while any(version <= base for version, base in zip(pulled.versions, base_versions, strict=True)):
            if time.monotonic() - started_s > self._timeout_s:
                raise WorldError(
                    f"fewer than {self._policy.scaling.pushes_per_step} groups have pushed within "
                    f"{self._timeout_s:g} s; see the output of group {pulled.slowest_group}, which is the furthest "
                    "behind"
                )
            time.sleep(_POLL_S)
            pulled = self._client.pull()
        return pulled

    def _wait_for_slowest(self, pulled: PulledParams) -> PulledParams:
        """Wait for groups that are further behind than the policy allows."""
        started_s, max_staleness = time.monotonic(), self._policy.max_staleness
        while max_staleness is not None and pulled.lead > max_staleness:
            if time.monotonic() - started_s > self._timeout_s:
                raise WorldError(
                    f"group {pulled.slowest_group} has not pushed for {self._timeout_s:g} s, and the others wait for "
                    "it; see its output"
                )
            time.sleep(_POLL_S)
            pulled = self._client.pull()
        return pulled
