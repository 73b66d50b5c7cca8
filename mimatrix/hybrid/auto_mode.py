"""`mimatrix.init(mode="auto")`: all ranks begin together, and go on in the mode that brings more with their model.

Why the run becomes another one in `prepare`: docs/decisions/0014-a-run-that-decides.md.
"""

import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore, Store

from mimatrix.comm.registration import register
from mimatrix.core.errors import UserError
from mimatrix.engine.api import GroupFactory
from mimatrix.engine.api import init as init
from mimatrix.engine.data.source import MicroBatchSource
from mimatrix.engine.modules import batchnorm
from mimatrix.engine.outer_optimizer import MODES
from mimatrix.engine.prepare import check_prepared, ground_of
from mimatrix.engine.run import Run
from mimatrix.engine.settings import Settings
from mimatrix.hybrid.deciding import decided
from mimatrix.hybrid.groups import Groups, locate_rank
from mimatrix.hybrid.mode import Hybrid as Hybrid
from mimatrix.hybrid.mode import is_rejoining, job_rank, job_store, launched_groups, rendezvous_file
from mimatrix.hybrid.rendezvous import write_file
from mimatrix.planner.modes import Apart, Choice
from mimatrix.planner.plan import Plan


class AutoMode:
    """Synchronous, or groups of the ranks of a host, or as `mimatrix run --groups` says."""

    def run(self, settings: Settings, device: torch.device, timeout_s: float) -> Run:
        """The part that this process has of a run that is not decided yet; one process alone has nothing to decide."""
        _check(settings)
        rank, ranks = job_rank()
        if ranks == 1:
            return Run(settings, device=device)
        if is_rejoining():
            return RejoinedRun(settings, device, timeout_s)
        store, timeout = job_store(rank, ranks, timeout_s), timedelta(seconds=timeout_s)
        register()
        dist.init_process_group(
            "mimatrix", store=PrefixStore("together", store), rank=rank, world_size=ranks, timeout=timeout
        )
        return AutoRun(settings, store, timeout, device)


class AutoRun(Run):
    """Of all ranks together until `prepare`; then it is what was chosen."""

    def __init__(self, settings: Settings, store: Store, timeout: timedelta, device: torch.device) -> None:
        rank, ranks = job_rank()
        super().__init__(settings, GroupFactory(timeout), rank=rank, ranks=ranks, device=device)
        self._store, self._timeout = store, timeout
        self.choice: Choice | None = None
        """Once prepared: what was chosen, from what, and why."""

    def prepare(self, model: Any, optimizer: Any, dataset: Any, /, *given: Any, **named: Any) -> Any:
        """As of any run; before it, devices and links are measured, and the mode is chosen. All ranks call it."""
        if self.choice is None:
            self.choice = self._decide(model, optimizer, dataset, **named)
        return super().prepare(model, optimizer, dataset, *given, **named)

    def _decide(
        self, model: Any, optimizer: Any, dataset: Any, *, loss: Any = None, whole: Any = (), **loading: Any
    ) -> Choice:
        loading.pop("scheduler", None)
        check_prepared(model, optimizer, loading)
        feed = MicroBatchSource(
            dataset, self._world.split, self.rank, seed=self.settings.seed, device=self.device, **loading
        )
        model.to(self.device)
        self._phase = "profiling"
        groups = Hybrid().resolve_groups(self._store, self.rank, self.ranks)
        choice = decided(ground_of(self._world, model, optimizer, loss, feed, whole), groups)
        if choice.mode == "sync" or choice.apart is None:
            self._world.settings = _planned(self.settings, choice.together, choice.reason, model)
        else:
            plan = choice.apart.groups[locate_rank(groups, self.rank)[0]].plan
            self._part(_planned(self.settings, plan, choice.reason, model), groups, choice)
        return choice

    def _part(self, settings: Settings, groups: Groups, choice: Choice) -> None:
        """Leave the group of all, and become a rank of one's own."""
        rank, leaving = self.rank, self._leaving
        # Nobody leaves while another still reads what was said last.
        self._store.set(f"auto/heard/{rank}", "")
        self._store.wait([f"auto/heard/{other}" for other in range(self.ranks)], self._timeout)
        dist.destroy_process_group()
        assert choice.apart
        if word := rendezvous_file():
            # Before all meet, so it is there when anybody returns; on each node, for those that share no files.
            write_file(_choice_beside(word), json.dumps(choice.to_json()))
        seat = as_priced(choice.apart).seat(settings, self._store, groups, rank, self._timeout.total_seconds())
        super().__init__(
            seat.settings, seat.further, rank=seat.rank, ranks=seat.ranks, device=self.device, outer=seat.member
        )
        self._leaving = leaving


class RejoinedRun(Run):
    """Of a group that was lost: in the way that was chosen when all were there."""

    def __init__(self, settings: Settings, device: torch.device, timeout_s: float) -> None:
        self.choice = _choice_left()
        assert self.choice.apart
        rank, ranks = job_rank()
        groups = launched_groups(ranks)
        self._own_plan = self.choice.apart.groups[locate_rank(groups, rank)[0]].plan
        store = job_store(rank, ranks, timeout_s)
        seat = as_priced(self.choice.apart).seat(settings, store, groups, rank, timeout_s)
        super().__init__(
            seat.settings, seat.further, rank=seat.rank, ranks=seat.ranks, device=device, outer=seat.member
        )

    def prepare(self, model: Any, optimizer: Any, dataset: Any, /, *given: Any, **named: Any) -> Any:
        """As of any run, by the plan that the group had when it began."""
        self._world.settings = _planned(self.settings, self._own_plan, self.choice.reason, model)
        return super().prepare(model, optimizer, dataset, *given, **named)


def _choice_left() -> Choice:
    word = rendezvous_file()
    assert word, "a group that rejoins has this file"
    try:
        return Choice.from_json(json.loads(_choice_beside(word).read_text()))
    except OSError as error:
        raise UserError(f"what was chosen cannot be read ({error}); start all again") from None


def _planned(settings: Settings, plan: Plan, reason: str, model: nn.Module) -> Settings:
    """By a plan that says first why the mode was chosen; batches follow speeds, as with `plan="profile"`."""
    follows = settings.rebalance
    if follows is None:
        # With batch norm, who follows must know of memory.
        follows = len(plan.parts) > 1 and not (settings.sync_batchnorm and batchnorm.count(model))
    said = replace(plan, reasons=(reason, *plan.reasons))
    return replace(settings, plan=said, micro_batch=None, rebalance=follows)


def _choice_beside(word: Path) -> Path:
    return word.with_name(f"{word.name}-choice")


def as_priced(apart: Apart) -> Hybrid:
    """What the price was made for."""
    if apart.local_steps:
        return Hybrid(policy="local", options={"local_steps": apart.local_steps})
    return Hybrid(overlaps=apart.overlaps)


def _check(settings: Settings) -> None:
    """What is given for each rank would not fit the ranks of a group."""
    per_rank = settings.shares is not None or not isinstance(settings.micro_batch, int | None)
    if settings.batch != "auto" or per_rank or settings.plan not in (None, "profile"):
        raise UserError(
            'mode="auto" measures the devices and plans batches and shares itself; leave out batch, shares, a list of '
            "micro_batch and plan, or choose a mode"
        )
    Hybrid().check(settings)
    if dist.is_initialized():
        raise UserError('mode="auto" makes its own process group; leave out torch.distributed.init_process_group')


MODES["auto"] = AutoMode
