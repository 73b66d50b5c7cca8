"""A group of ranks among others: in place of a step of its optimizer it pushes to the shards, and pulls from them."""

import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mimatrix.comm.group import Group
from mimatrix.core.errors import UserError, WorldError
from mimatrix.engine.checkpoint.storage import TensorReader
from mimatrix.engine.outer_optimizer import OuterState, PushStats
from mimatrix.engine.zero.sharded_optimizer import ShardedOptimizer, check_elementwise
from mimatrix.hybrid.client.checkpoint import GlobalState
from mimatrix.hybrid.client.client import PulledParams, ShardsClient
from mimatrix.hybrid.client.consistent_cut import ConsistentCut
from mimatrix.hybrid.client.flat_layout import FlatLayout
from mimatrix.hybrid.policy import Policy
from mimatrix.hybrid.server.shard import Hyperparameters

Connect = Callable[[FlatLayout, torch.Tensor], ShardsClient]
"""Finds the shards, or makes those that are this group's; only its first rank does."""
_LOOKS_S = 0.005


@dataclass(frozen=True)
class _Push:
    """What the thread that pushes is handed."""

    change: torch.Tensor
    samples: int
    usual: int
    settings: list[Hyperparameters]
    seen: tuple[int, ...]
    untouched: list[int]


def _check_cut(optimizer: Optimizer) -> None:
    """Shards are rows without shapes: an optimizer that looks at whole tensors would do something else there."""
    try:
        check_elementwise(optimizer, 1)
    except UserError:
        name = type(optimizer).__name__
        raise UserError(
            f"{name} does not treat every element by itself, so groups cannot cut it over hosts; use "
            'mimatrix.Hybrid(policy="local"), where each group steps by its own, or another optimizer'
        ) from None


class GroupOptimizer:
    """One rank of a group, as its run sees the others (`engine.outer.Outer`)."""

    def __init__(
        self,
        connect: Connect,
        policy: Policy,
        *,
        group: int = 0,
        is_first: bool = True,
        overlaps: bool = False,
        timeout_s: float = 300.0,
    ) -> None:
        self.group, self.is_first = group, is_first
        self._connect, self._policy = connect, policy
        self._overlaps = overlaps and not policy.local_steps and not policy.scaling.pushes_per_step
        self._timeout_s = timeout_s
        self._link: ShardsClient | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="mimatrix-push")
        self._under_way: Future[PulledParams] | None = None
        self._has: PulledParams | None = None
        """What was pulled last; known to the first rank."""
        self._steps = self._since = 0
        """Of its own, and samples, since the last push."""
        self.samples = 0
        self._others_s = 0.0
        """Of the last push: what others were in its way."""
        self.now = PushStats()

    def begin(self, model: nn.Module, binding: ShardedOptimizer, group: Group | None, *, cut: bool) -> None:
        """Meet the others: all begin with the same parameters."""
        del model
        if not self._policy.local_steps:
            _check_cut(binding.optimizer)
        self._group, self._cut = group, cut
        known = [[each for each in part if each.requires_grad] for part in binding.given]
        self._layout = FlatLayout.of(binding, known)
        self._row = torch.zeros(self._layout.count, dtype=self._layout.dtype)
        self._layout.read_values(self._row)
        self._join()
        if self.is_first:
            self._link = self._connect(self._layout, self._row)
            self._link.join()
            self._has = self._link.pull()
            self._row.copy_(self._has.values)
        self._share()

    def step(self, samples: int, usual: int, own: Callable[[], object]) -> None:
        """Push this batch's gradient, and go on with what there is then; or step alone, and push now and then."""
        self._since += samples
        if not self._policy.local_steps:
            self._step_by_gradient(usual)
            return
        own()
        self._steps += 1
        if self._steps == self._policy.local_steps:
            self._steps = 0
            self._step_by_distance(usual * self._policy.local_steps)

    def mark(self) -> Callable[[], OuterState]:
        """What the shards have, all of them with the same pushes: this group's last one, and what others pushed."""
        if not self.is_first:
            return OuterState
        if self._under_way:
            self._under_way.result()
        held = self._copied()
        own = {"group": self.group, "steps": self._steps, "since": self._since, "local": self._policy.local_steps}
        return lambda: self._fetched(held, own | {"mark": secrets.token_hex(8)})

    def restore(self, facts: Mapping[str, Any], tensors: TensorReader) -> Callable[[], None]:
        """Shards that have not begun yet begin with the checkpoint; others keep what they have, and it is taken."""
        if bool(facts["local"]) != bool(self._policy.local_steps) or facts["count"] != self._layout.count:
            raise UserError("the checkpoint is of another model, or of groups with another policy; use the same")
        is_there = self.is_first and self._put(GlobalState.read(facts, tensors, self._layout.pieces), facts["mark"])

        def finish() -> None:
            kept = torch.tensor([int(is_there and bool(self._policy.local_steps))])
            if self._group:
                self._group.broadcast(kept).wait()
            # Groups that step by themselves are somewhere else than the common parameters: where the checkpoint says.
            self._layout.read_values(self._row)
            self._join()
            if self.is_first and not kept:
                assert self._has
                self._row.copy_(self._has.values)
            self._share()
            self._steps, self._since = (facts["steps"], facts["since"]) if kept else (0, 0)

        return finish

    def close(self) -> None:
        """Let the last push arrive."""
        if self._under_way:
            self._under_way.result()
        self._thread.shutdown()
        if self._link:
            self._link.close()

    def _copied(self) -> ConsistentCut:
        """Twice, where a shard goes over to its mirror meanwhile."""
        assert self._link
        for attempt in range(2):
            try:
                with self._link.holding() as held:
                    held.copy()
                break
            except WorldError:
                if attempt:
                    raise
        return held

    def _fetched(self, held: ConsistentCut, own: dict[str, Any]) -> OuterState:
        try:
            kept = held.fetched()
        except WorldError:
            # A service was lost with its copy. What all have by now is as good: others have gone on, too.
            kept = self._copied().fetched()
        parts, facts = GlobalState.joined(kept, self._layout.pieces).to_parts()
        return OuterState(parts, facts | own)

    def _put(self, whole: GlobalState, mark: str) -> bool:
        """Whether the shards are where the checkpoint is."""
        link = self._link
        assert link
        if self._under_way:
            self._under_way.result()
            self._under_way = None
        with link.holding(self._timeout_s) as held:
            found = held.put(whole.split(self._layout.pieces, link.sizes, self._policy.scaling, mark))
        link.join()
        self._has = link.pull()
        return found

    def _step_by_gradient(self, usual: int) -> None:
        self._layout.read_gradients(self._row)
        self._join()
        untouched = self._untouched()
        if self.is_first:
            assert self._has
            seen = self._has.versions
            if self._under_way:
                self._has = self._waited_for(self._under_way)
            push = _Push(self._row.clone(), self._since, usual, self._layout.settings(), seen, untouched)
            self._under_way = self._thread.submit(self._pushed, push)
            if not self._overlaps:
                self._has, self._under_way = self._waited_for(self._under_way), None
            self._row.copy_(self._has.values)
        self._share()

    def _waited_for(self, under_way: Future[PulledParams]) -> PulledParams:
        began = time.monotonic()
        found = under_way.result()
        self._count(time.monotonic() - began)
        return found

    def _count(self, still_s: float) -> None:
        """The group stood still for a push, some of it for others."""
        others_s = min(still_s, self._others_s)
        now = self.now
        self.now = replace(now, waited_s=now.waited_s + others_s, moved_s=now.moved_s + still_s - others_s)

    def _step_by_distance(self, usual: int) -> None:
        """How far the group is from the common parameters, as if that were a gradient."""
        self._layout.read_values(self._row)
        self._join()
        if self.is_first:
            assert self._link
            assert self._has
            began, drawn, outer = time.monotonic(), self._policy.moving_rate, dict(self._policy.outer or {})
            common = self._has if drawn == 1 else self._link.pull()
            way = (common.values - self._row) * drawn
            settings: list[Hyperparameters] = [outer for _ in self._layout.settings()]
            self._has = self._pushed(_Push(way, self._since, usual, settings, common.versions, []))
            self._count(time.monotonic() - began)
            self._row.copy_(self._has.values if drawn == 1 else self._row + way)
        self._share()

    def _pushed(self, push: _Push) -> PulledParams:
        link = self._link
        assert link
        found = link.push(push.change, push.samples, push.usual, push.settings, push.seen, push.untouched)
        pushed_s = time.monotonic()
        pulled = (
            self._stepped(link, found.pulled, push.seen)
            if self._policy.scaling.pushes_per_step
            else self._caught_up(link, found.pulled)
        )
        self._others_s = found.waited_s + time.monotonic() - pushed_s
        now = self.now
        self.now = replace(now, pushes=now.pushes + 1, samples=now.samples + push.samples, staleness=found.staleness)
        return pulled

    def _stepped(self, link: ShardsClient, pulled: PulledParams, seen: tuple[int, ...]) -> PulledParams:
        """What there is when enough groups have pushed on the same version."""
        began = time.monotonic()
        while any(now <= before for now, before in zip(pulled.versions, seen, strict=True)):
            if time.monotonic() - began > self._timeout_s:
                raise WorldError(
                    f"not {self._policy.scaling.pushes_per_step} groups have pushed within {self._timeout_s:g} s; group "
                    f"{pulled.last} has pushed least"
                )
            time.sleep(_LOOKS_S)
            pulled = link.pull()
        return pulled

    def _caught_up(self, link: ShardsClient, pulled: PulledParams) -> PulledParams:
        """Wait for groups that are too far behind, where the policy says so."""
        began, most = time.monotonic(), self._policy.max_staleness
        while most is not None and pulled.ahead > most:
            if time.monotonic() - began > self._timeout_s:
                raise WorldError(f"group {pulled.last} has not pushed for {self._timeout_s:g} s, and is waited for")
            time.sleep(_LOOKS_S)
            pulled = link.pull()
        return pulled

    def _untouched(self) -> list[int]:
        """The parameters that had no gradient on any rank."""
        touched = self._layout.touched()
        if self._group and self._cut:
            self._group.all_reduce(touched).wait()
        found: list[int] = (touched == 0).nonzero().flatten().tolist()
        return found

    def _join(self) -> None:
        """Where each rank has a part, all parts: nothing else is added to any of them."""
        if self._group and self._cut:
            self._group.all_reduce(self._row).wait()

    def _share(self) -> None:
        """What the first rank has in its row becomes what all have."""
        counted = torch.tensor([self._has.samples if self._has else 0])
        if self._group:
            self._group.broadcast(self._row).wait()
            self._group.broadcast(counted).wait()
        self._layout.write_values(self._row)
        self.samples, self._since = int(counted[0]), 0
