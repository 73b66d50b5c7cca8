"""`mimatrix.init`: join a training run under `mimatrix run`, a job server or torchrun, or alone."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch

from mimatrix.core import environment
from mimatrix.core.errors import UserError, nearest
from mimatrix.core.logs import configure_logging
from mimatrix.engine.excepthook import install_excepthook
from mimatrix.engine.mode import Mode, SyncMode
from mimatrix.engine.run import Run, start_run
from mimatrix.engine.settings import Batch, Settings
from mimatrix.hybrid.auto_mode import AutoMode
from mimatrix.hybrid.mode import Hybrid
from mimatrix.planner.model.plan import Plan

_MODES: dict[str, Callable[[], Mode]] = {"sync": SyncMode, "hybrid": Hybrid, "auto": AutoMode}

_DEVICE_TYPES = ("cpu", "cuda")


def init(
    global_batch: int | None = None,
    batch: Batch = "auto",
    *,
    micro_batch: int | Sequence[int] | None = None,
    stage: Literal["auto", 0, 1, 2, 3] = "auto",
    shares: Sequence[float] | None = None,
    seed: int = 0,
    precision: str | Mapping[int | str, str] = "fp32",
    max_grad_norm: float | None = None,
    sync_batchnorm: bool = True,
    unit_bytes: int | None = None,
    plan: Plan | Path | str | None = None,
    rebalance: bool | None = None,
    mode: str | Mode = "sync",
    device: torch.device | str | None = None,
    timeout_s: float = 300.0,
    checkpoint_every: float | str | None = None,
    max_failed_saves: int = 3,
    quiet: bool = False,
) -> Run:
    """Join a training run and return this process's handle to it.

    Works the same under `mimatrix run`, `mimatrix submit` and torchrun, and alone as a single process. All ranks give
    the same arguments, `device` and `quiet` excepted.

    Args:
        global_batch: Samples in one optimizer step, over all ranks. It does not change with the number of ranks.
        batch: Samples of each rank: "auto" (equal), one number for all, a list by rank, or a dict by rank or by a
            part of the device's name.
        micro_batch: The most samples that a rank processes at once; a list gives each rank its own.
        stage: ZeRO stage: 0 shards nothing, 1 the optimizer's state, 2 also gradients, 3 also parameters.
        shares: The part of the sharded states that each rank owns; must sum to 1. By default equal.
        seed: Seeds the order of samples, and the processes that load them. Weights, dropout and augmentation in the
            training process follow what the script seeds, such as by `torch.manual_seed`; `run.prepare` gives each rank
            random numbers of its own, derived from that.
        precision: "fp32", "bf16" or "fp16", or a dict by rank or by a part of the device's name.
        max_grad_norm: Clip the gradient of the whole model to this norm, in place of `clip_grad_norm_`; `run.grad_norm`
            and `run.history` have the norm before clipping. `float("inf")` computes it and clips nothing.
        sync_batchnorm: Compute batch norm over the samples of all ranks.
        unit_bytes: Size of the groups of parameters that are communicated together.
        plan: Find batches, stage and shares: "profile" measures every device first, "online" starts evenly and adapts
            while it trains, "auto" is "profile" if `run.prepare` is given the loss and otherwise "online", a file name
            uses a plan that `mimatrix plan --output` wrote. None: as given here; the log then says if ranks wait.
        rebalance: Whether batches follow the speed that ranks show; by default with "auto", "profile" and "online".
        mode: "sync": all ranks step together. "hybrid" or `mimatrix.Hybrid(...)`: groups of ranks do, and do not wait
            for each other. "auto": `prepare` measures, and takes the faster one.
        device: The device of this rank; by default its GPU by local rank, or the CPU.
        timeout_s: How long to wait for a peer before it counts as lost.
        checkpoint_every: Save by itself, whatever the script saves: after a time such as "15m" or 900 (seconds), or
            after steps, such as "500 steps". By default what `MIMATRIX_CHECKPOINT_EVERY` says, which the job server
            sets to 15 minutes; otherwise, and with "never", only the script saves. Such a checkpoint goes where the
            script saves, or loads from if it has not saved yet, and has the script's state as `run.save` without
            `user_state` would; see `run.register_user_state`.
        max_failed_saves: After how many failed saves in a row training stops, as a disk is full or broken.
        quiet: Log warnings only.

    Returns:
        The run: call `run.prepare` next.

    Raises:
        UserError: An argument is wrong, or ranks were given different ones; the message says what to change.

    Example:
        >>> run = mimatrix.init(global_batch=512, plan="profile")
        >>> model, optimizer, loader = run.prepare(model, optimizer, dataset, loss=loss_fn)
    """
    install_excepthook()
    configure_logging(quiet=quiet)
    settings = Settings(
        global_batch=global_batch,
        batch=batch,
        micro_batch=micro_batch,
        stage=stage,
        shares=shares,
        seed=seed,
        precision=precision,
        max_grad_norm=max_grad_norm,
        sync_batchnorm=sync_batchnorm,
        unit_bytes=unit_bytes,
        quiet=quiet,
        plan=plan,
        rebalance=rebalance,
        checkpoint_every=environment.CHECKPOINT_EVERY.get() or None if checkpoint_every is None else checkpoint_every,
        max_failed_saves=max_failed_saves,
    )
    own_device = _check_device(device) if device is not None else _default_device()
    if own_device.type == "cuda":
        torch.cuda.set_device(own_device)
    return start_run(_resolve_mode(mode), settings, own_device, timeout_s)


def _resolve_mode(mode: str | Mode) -> Mode:
    if not isinstance(mode, str):
        return mode
    if mode not in _MODES:
        raise UserError(f'unknown mode "{mode}"{nearest(mode, _MODES)}')
    return _MODES[mode]()


def _check_device(device: torch.device | str) -> torch.device:
    try:
        own = torch.device(device)
    except RuntimeError as error:
        raise UserError(f'unknown device "{device}"; use device="cuda" or device="cpu"') from error
    if own.type not in _DEVICE_TYPES:
        raise UserError(f'device "{own}" is not supported; use device="cuda" or device="cpu"')
    return own


def _default_device() -> torch.device:
    """Return the GPU of this rank by its number on the host, which ranks may share; the CPU if there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count())


init.__module__ = "mimatrix"
