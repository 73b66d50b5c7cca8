"""Modes: how a process joins a job, and what is decided when a model is prepared."""

import pytest
import torch
from torch import nn

from mimatrix.core import environment
from mimatrix.core.errors import UserError
from mimatrix.engine.mode import Membership, SyncMode
from mimatrix.engine.prepare import PrepareInputs
from mimatrix.engine.settings import Settings
from mimatrix.engine.world import World


def test_membership_settles_on_the_world_that_it_joined() -> None:
    membership = Membership(World.join(Settings(global_batch=4)))
    model = nn.Linear(2, 1)
    inputs = PrepareInputs(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), dataset=range(8))
    assert membership.settle(inputs) is membership.world
    assert not membership.measures_devices


def test_sync_mode_alone_is_a_world_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv(environment.GROUPS.name, raising=False)
    world = SyncMode().join(Settings(global_batch=4), torch.device("cpu"), 5.0).world
    assert (world.rank, world.world_size, world.main, world.outer) == (0, 1, None, None)


def test_sync_mode_refuses_a_job_with_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.GROUPS.name, "[[0], [1]]")
    with pytest.raises(UserError, match='use mode="hybrid", or leave out --groups'):
        SyncMode().join(Settings(global_batch=4), torch.device("cpu"), 5.0)


def test_a_world_keeps_its_timeout_with_other_settings() -> None:
    world = World.join(Settings(global_batch=4, quiet=True), timeout_s=7.0)
    assert world.with_settings(world.settings).timeout_s == 7.0
