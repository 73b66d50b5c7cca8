"""Modes of training: how processes find each other, and what is still open until a model is prepared."""

import json
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from mimatrix.comm.registration import register
from mimatrix.comm.tcp_store import serve_store
from mimatrix.core import environment
from mimatrix.core.errors import UserError
from mimatrix.engine.prepare import PrepareInputs
from mimatrix.engine.process_groups import GroupFactory
from mimatrix.engine.settings import Settings
from mimatrix.engine.world import World


@dataclass(frozen=True)
class Membership:
    """The place of this process in a job, and what is still open until a model is prepared: here nothing."""

    world: World

    @property
    def measures_devices(self) -> bool:
        """Whether `settle` measures devices, which takes a while."""
        return False

    def settle(self, inputs: PrepareInputs) -> World:  # noqa: ARG002 (modes differ)
        """Decide what depends on the model, and return this process's place from now on. A collective."""
        return self.world


class Mode(Protocol):
    """A way to train: all ranks together, or groups that do not wait for each other."""

    def join(self, settings: Settings, device: torch.device, timeout_s: float) -> Membership:
        """Find the other processes of the job. A collective."""


class SyncMode:
    """All ranks make every step together."""

    def join(self, settings: Settings, device: torch.device, timeout_s: float) -> Membership:
        """Join the ranks that `mimatrix run`, the job server or torchrun started; alone, be a single process."""
        if len(json.loads(environment.GROUPS.get(default="[]"))) > 1:
            raise UserError(
                'the job was started with --groups, and mode="sync" has none; use mode="hybrid", or leave out --groups'
            )
        if int(os.environ.get("WORLD_SIZE", "1")) == 1 and not dist.is_initialized():
            return Membership(World.join(settings, device=device))
        timeout = timedelta(seconds=timeout_s)
        register()
        if not dist.is_initialized():
            store = serve_store()
            dist.init_process_group("mimatrix", timeout=timeout)
            del store
        world = World.join(
            settings,
            rank=dist.get_rank(),
            world_size=dist.get_world_size(),
            device=device,
            new_group=GroupFactory(timeout),
            timeout_s=timeout_s,
        )
        return Membership(world)
