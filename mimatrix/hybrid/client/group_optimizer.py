"""The outer optimizer of a group of ranks: in place of a step it pushes to the shards and pulls from them."""

import secrets
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mimatrix.comm.group import Group
from mimatrix.core.errors import UserError
from mimatrix.engine.checkpoint.outer_state import OuterState
from mimatrix.engine.checkpoint.tensor_files import TensorReader
from mimatrix.engine.outer_optimizer import PushStats
from mimatrix.engine.zero.sharded_optimizer import ShardedOptimizer, check_elementwise
from mimatrix.hybrid.client.checkpoint import GlobalState, check_format
from mimatrix.hybrid.client.client import ShardsClient
from mimatrix.hybrid.client.consistent_cut import ConsistentCut
from mimatrix.hybrid.client.flat_layout import FlatLayout
from mimatrix.hybrid.client.leader import GroupLeader
from mimatrix.hybrid.policy import Policy
from mimatrix.hybrid.server.shard import Hyperparameters

Connect = Callable[[FlatLayout, torch.Tensor], ShardsClient]
"""Starts the servers of this group and finds all others; only the group's first rank calls it."""


class GroupOptimizer:
    """One rank of a group, as its run sees all groups (`engine.outer_optimizer.OuterOptimizer`).

    Args:
        connect: Finds the shards.
        policy: When groups push, and what.
        group: The number of this group.
        is_first: Whether this is the group's first rank, which pushes for all.
        overlaps: Whether the group computes while a push is in flight.
        timeout_s: How long to wait for other groups.
    """

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
        self._overlaps, self._timeout_s = overlaps, timeout_s
        self._session: GroupSession | None = None

    @property
    def samples(self) -> int:
        """Samples that all groups together have pushed."""
        return self._session.samples if self._session else 0

    @property
    def stats(self) -> PushStats:
        """Statistics of this group's pushes, on its first rank."""
        return self._session.leader.stats if self._session and self._session.leader else PushStats()

    def begin(self, model: nn.Module, optimizer: ShardedOptimizer, group: Group | None, *, sharded: bool) -> None:
        """Join the other groups; all start with the same parameters."""
        del model
        if not self._policy.local_steps:
            _check_splittable(optimizer.optimizer)
        trainable = [[param for param in params if param.requires_grad] for params in optimizer.original_params]
        params = GroupParams(FlatLayout.build(optimizer, trainable), group, is_sharded=sharded)
        params.read_params()
        leader = None
        if self.is_first:
            client = self._connect(params.layout, params.flat)
            leader = GroupLeader.join(client, self._policy, overlaps=self._overlaps, timeout_s=self._timeout_s)
            params.flat.copy_(leader.pulled.values)
        self._session = GroupSession(params, leader, self._policy, self.group)
        self._session.broadcast()

    def step(self, samples: int, global_batch: int, step_optimizer: Callable[[], object]) -> None:
        """Push this batch's gradient and pull; or step locally with `step_optimizer`, and push now and then."""
        self._joined.step(samples, global_batch, step_optimizer)

    def mark(self) -> Callable[[], OuterState]:
        """Copy all shards, with the same pushes applied; the returned function fetches the copies."""
        return self._joined.mark()

    def restore(self, metadata: Mapping[str, Any], tensors: TensorReader) -> Callable[[], None]:
        """Load a checkpoint into shards that have not been trained yet; take over those that have.

        The returned function updates the model; all ranks call it.
        """
        return self._joined.restore(metadata, tensors)

    def close(self) -> None:
        """Finish the push in flight, and leave."""
        if self._session and self._session.leader:
            self._session.leader.close()

    @property
    def _joined(self) -> "GroupSession":
        assert self._session, "the run calls `begin` first"
        return self._session


class GroupParams:
    """The parameters of one group as a flat tensor, on each of its ranks.

    Args:
        layout: Where this rank's parameters lie in the flat tensor.
        group: The ranks of the group; None for a single rank.
        is_sharded: Whether each rank has only a part of the parameters.
    """

    def __init__(self, layout: FlatLayout, group: Group | None, *, is_sharded: bool) -> None:
        self.layout, self._group, self._is_sharded = layout, group, is_sharded
        self.flat = torch.zeros(layout.numel, dtype=layout.dtype)

    def read_params(self) -> None:
        """Assemble the parameters of all ranks in the flat tensor."""
        self.layout.read_params(self.flat)
        self._assemble()

    def read_grads(self) -> list[int]:
        """Assemble the gradients of all ranks in the flat tensor; return the parameters that have none on any rank."""
        self.layout.read_grads(self.flat)
        self._assemble()
        mask = self.layout.grad_mask()
        if self._group and self._is_sharded:
            self._group.all_reduce(mask).wait()
        without_grad: list[int] = (mask == 0).nonzero().flatten().tolist()
        return without_grad

    def broadcast_flag(self, flag: bool) -> bool:
        """Return the first rank's flag on all ranks."""
        value = torch.tensor([int(flag)])
        if self._group:
            self._group.broadcast(value).wait()
        return bool(value)

    def broadcast(self, samples: int) -> int:
        """Write the first rank's flat tensor to the parameters of all ranks; return its sample count on all of them."""
        count = torch.tensor([samples])
        if self._group:
            self._group.broadcast(self.flat).wait()
            self._group.broadcast(count).wait()
        self.layout.write_params(self.flat)
        return int(count[0])

    def _assemble(self) -> None:
        """Add up the parts of all ranks; elsewhere each rank has zeros."""
        if self._group and self._is_sharded:
            self._group.all_reduce(self.flat).wait()


class GroupSession:
    """One rank of a group that has joined the others. All ranks of the group call everything together."""

    def __init__(self, params: GroupParams, leader: GroupLeader | None, policy: Policy, group: int) -> None:
        self._params, self.leader, self._policy, self._group = params, leader, policy, group
        self.samples = 0
        """Samples that all groups together have pushed."""
        self._local_steps = self._local_samples = 0
        """Steps and samples of this group since its last push."""

    def step(self, samples: int, global_batch: int, step_optimizer: Callable[[], object]) -> None:
        """Push this batch's gradient and pull; or step locally with `step_optimizer`, and push now and then."""
        self._local_samples += samples
        if not self._policy.local_steps:
            self._push_gradient(global_batch)
            return
        step_optimizer()
        self._local_steps += 1
        if self._local_steps == self._policy.local_steps:
            self._local_steps = 0
            self._push_distance(global_batch * self._policy.local_steps)

    def broadcast(self) -> None:
        """Give the first rank's flat tensor to the model on all ranks."""
        self.samples = self._params.broadcast(self.leader.pulled.samples if self.leader else 0)
        self._local_samples = 0

    def mark(self) -> Callable[[], OuterState]:
        """Copy all shards, with the same pushes applied; the returned function fetches the copies."""
        if not self.leader:
            return OuterState
        leader = self.leader
        leader.flush()
        cut = leader.copy_shards()
        own = {
            "group": self._group,
            "steps_since_push": self._local_steps,
            "samples_since_push": self._local_samples,
            "local_steps": self._policy.local_steps,
        }
        return lambda: self._fetch(leader, cut, own | {"origin": secrets.token_hex(8)})

    def restore(self, metadata: Mapping[str, Any], tensors: TensorReader) -> Callable[[], None]:
        """Load a checkpoint into shards that have not been trained yet; take over those that have."""
        check_format(metadata)
        layout = self._params.layout
        if bool(metadata["local_steps"]) != bool(self._policy.local_steps) or metadata["count"] != layout.numel:
            raise UserError("the checkpoint is of another model, or of groups with another policy; use the same")
        is_loaded = False
        if self.leader:
            state = GlobalState.from_checkpoint(metadata, tensors, layout.spans)
            shards = state.split(layout.spans, self.leader.shard_sizes, self._policy.scaling, metadata["origin"])
            is_loaded = self.leader.load(shards)

        def finish() -> None:
            # With local steps a group's own parameters differ from the common ones; the checkpoint has them.
            keeps_own = self._params.broadcast_flag(is_loaded and bool(self._policy.local_steps))
            self._params.read_params()
            if self.leader and not keeps_own:
                self._params.flat.copy_(self.leader.pulled.values)
            self.broadcast()
            self._local_steps, self._local_samples = (
                (metadata["steps_since_push"], metadata["samples_since_push"]) if keeps_own else (0, 0)
            )

        return finish

    def _fetch(self, leader: GroupLeader, cut: ConsistentCut, own: dict[str, Any]) -> OuterState:
        parts, metadata = GlobalState.merge(leader.fetch(cut), self._params.layout.spans).to_checkpoint()
        return OuterState(parts, metadata | own)

    def _push_gradient(self, nominal_samples: int) -> None:
        without_grad = self._params.read_grads()
        if self.leader:
            flat, layout = self._params.flat, self._params.layout
            flat.copy_(
                self.leader.push_gradient(
                    flat, self._local_samples, nominal_samples, layout.hyperparameters(), without_grad
                )
            )
        self.broadcast()

    def _push_distance(self, nominal_samples: int) -> None:
        self._params.read_params()
        if self.leader:
            flat, outer = self._params.flat, dict(self._policy.outer or {})
            hyperparameters: list[Hyperparameters] = [outer for _ in self._params.layout.hyperparameters()]
            flat.copy_(self.leader.push_distance(flat, self._local_samples, nominal_samples, hyperparameters))
        self.broadcast()


def _check_splittable(optimizer: Optimizer) -> None:
    """Refuse optimizers that look at whole tensors: shards are flat and may cut through a parameter."""
    try:
        check_elementwise(optimizer, 1)
    except UserError:
        name = type(optimizer).__name__
        raise UserError(
            f"{name} does not treat every element by itself, so groups cannot split its state over hosts; use "
            'mimatrix.Hybrid(policy="local"), where each group steps with its own, or another optimizer'
        ) from None
