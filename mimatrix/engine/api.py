"""`mimatrix.init`: a run under `mimatrix run`, under torchrun, or alone, whatever the process finds around it."""

import json
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from mimatrix.comm.group import Group
from mimatrix.comm.registration import register
from mimatrix.core.errors import UserError, nearest
from mimatrix.engine.excepthook import tell_mistakes
from mimatrix.engine.observers import OBSERVERS
from mimatrix.engine.outer_optimizer import MODES, Mode
from mimatrix.engine.run import Run
from mimatrix.engine.settings import Batch, Settings
from mimatrix.planner.plan import Plan


def init(
    global_batch: int | None = None,
    batch: Batch = "auto",
    *,
    micro_batch: int | Sequence[int] | None = None,
    stage: Literal["auto", 0, 1, 2, 3] = "auto",
    shares: Sequence[float] | None = None,
    seed: int = 0,
    precision: str | Mapping[int | str, str] = "fp32",
    clip_norm: float | None = None,
    sync_batchnorm: bool = True,
    unit_bytes: int | None = None,
    plan: Plan | Path | str | None = None,
    rebalance: bool | None = None,
    mode: str | Mode = "sync",
    device: torch.device | str | None = None,
    timeout_s: float = 300.0,
    quiet: bool = False,
) -> Run:
    """The part of a run that this process has.

    `global_batch` samples make a step; `batch` says how many of them each rank takes: "auto" (equal), one number for
    all, a list, or a dict by rank or device name. `micro_batch` is the most that a rank takes at once. `stage` is the
    ZeRO stage and `shares` the part of the states that each rank owns. `precision` is "fp32", "bf16" or "fp16", or a
    dict by rank or device name. `clip_norm` clips by the norm of the whole gradient.

    `plan` finds batches, stage and shares by itself: "profile" measures every device first, "online" starts equal and
    learns while it trains, the name of a file uses a plan from `mimatrix plan`. `rebalance`: whether batches follow
    the speeds that ranks show; they do for "profile" and "online".

    `mode` is "sync", where all ranks make one step together; "hybrid" (or `mimatrix.Hybrid(...)`), where groups of
    them do, and never wait for each other; or "auto": `prepare` measures and takes the one that brings more.
    """
    tell_mistakes()
    settings = Settings(
        global_batch,
        batch,
        micro_batch,
        stage,
        shares,
        seed,
        precision,
        clip_norm,
        sync_batchnorm,
        unit_bytes,
        quiet,
        plan,
        rebalance,
    )
    where = torch.device(device) if device is not None else _own_device()
    if where.type == "cuda":
        torch.cuda.set_device(where)
    torch.manual_seed(seed)
    if mode != "sync":
        return _observed(_mode(mode).run(settings, where, timeout_s))
    if len(json.loads(os.environ.get("MIMATRIX_GROUPS") or "[]")) > 1:
        raise UserError(
            'the job was started with --groups, and in mode="sync" there are none; use mode="hybrid", or leave out '
            "--groups"
        )
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 and not dist.is_initialized():
        return _observed(Run(settings, device=where))
    register()
    if not dist.is_initialized():
        dist.init_process_group("mimatrix", timeout=timedelta(seconds=timeout_s))
    groups = GroupFactory(timedelta(seconds=timeout_s))
    return _observed(Run(settings, groups, rank=dist.get_rank(), ranks=dist.get_world_size(), device=where))


def _mode(mode: str | Mode) -> Mode:
    if not isinstance(mode, str):
        return mode
    if mode not in MODES:
        raise UserError(f'there is no mode "{mode}"{nearest(mode, ["sync", *MODES])}')
    return MODES[mode]()


def _observed(run: Run) -> Run:
    for observer in OBSERVERS:
        observer(run)
    return run


class GroupFactory:
    """Groups of all ranks, by name. Those but the first have a thread of their own, so that none waits for another."""

    def __init__(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def __call__(self, name: str) -> Group:
        """One more, or the first."""
        world: Any = dist.group.WORLD
        if name == "reduce" and hasattr(world, "mimatrix"):
            found: Group = world.mimatrix
            return found
        made: Any = dist.new_group(backend="mimatrix", timeout=self._timeout)
        group: Group = made.mimatrix
        group.use_own_thread()
        return group


def _own_device() -> torch.device:
    """The GPU of this rank, by its number on the machine; ranks may share one. The CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())
