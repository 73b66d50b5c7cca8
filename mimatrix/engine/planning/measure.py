"""Before training: every rank measures itself, all measure what moving the model takes, and rank 0 makes the plan."""

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from mimatrix.comm.group import Group
from mimatrix.core.errors import UserError
from mimatrix.engine.data.source import DataPosition, MicroBatchSource
from mimatrix.engine.modules import batchnorm
from mimatrix.engine.planning.communication import measure_communication
from mimatrix.engine.rank_exchange import RankExchange
from mimatrix.engine.settings import Settings
from mimatrix.engine.step_timer import StepTimer
from mimatrix.engine.zero.sharded_optimizer import check_elementwise
from mimatrix.engine.zero.units import is_compiled, units_of
from mimatrix.planner.plan import Plan, misfit
from mimatrix.planner.planning import Problem, make_plan
from mimatrix.planner.profile import STAGES, Communication, Measurements, ModelSize, Profile
from mimatrix.profiler import (
    Limits,
    ProfileTarget,
    cached_measure,
    code_fingerprint,
    device_identity,
    give_back_at_once,
    is_limited,
    limiting_group,
    model_size,
)

LossFn = Callable[[nn.Module, Any], torch.Tensor]
_FOR_EVERYONE = 0.05
"""The part of a step that it is worth that all ranks come by in the loop: then it may evaluate there."""


@dataclass(frozen=True)
class PrepareContext:
    """What is to be trained, and where: the model is whole and on its device."""

    settings: Settings
    model: nn.Module
    optimizer: Optimizer
    loss: LossFn | None
    feed: MicroBatchSource
    exchange: RankExchange
    group: Group | None
    rank: int
    devices: Sequence[str]
    device: torch.device
    precision: str
    context: Callable[[], AbstractContextManager[Any]]
    norms: int
    """Synchronised batch norms."""
    whole: tuple[type[nn.Module], ...] = ()

    @property
    def ranks(self) -> int:
        """How many there are."""
        return len(self.devices)

    @property
    def global_batch(self) -> int:
        """Samples of a step."""
        return self.feed.split_at(DataPosition(0, 0)).total


def survey(
    ground: PrepareContext, paying: Callable[[PrepareContext, ModelSize], Communication] | None = None
) -> Measurements:
    """What all ranks measured. A collective: what goes wrong on one is raised on all.

    `paying` finds what moving the model takes; without, its collectives are timed.
    """
    if ground.loss is None:
        raise UserError("measuring runs the model on its own; give run.prepare the loss: loss=loss_fn")
    size = size_of(ground)
    started = time.perf_counter()
    # First, since it takes memory that is kept for as long as the run lasts: devices are measured with what is left.
    paid = (paying or timed_communication)(ground, size)
    neighbours, sharers = _around(ground)
    said = together(ground, lambda: _profile(ground, size, neighbours, sharers).to_json())
    profiles = tuple(Profile.from_json(each) for each in said)
    if ground.device.type == "cuda":
        torch.cuda.empty_cache()
    say(ground, f"measured {ground.ranks} ranks in {time.perf_counter() - started:.1f} s")
    return Measurements(size, profiles, paid, equal_counts=bool(ground.norms))


def timed_communication(ground: PrepareContext, size: ModelSize) -> Communication:
    """What moving the model takes, tried out. A collective."""
    if ground.group is None:
        return Communication((0.0,) * 4, reason="nothing moves: one rank")
    dtype = next(parameter.dtype for parameter in ground.model.parameters() if parameter.requires_grad)
    return measure_communication(
        ground.group, ground.exchange, size.gradient_bytes, dtype, ground.device, norms=ground.norms
    )


def problem_of(ground: PrepareContext, found: Measurements) -> Problem:
    """What the planner is asked about these measurements."""
    settings = ground.settings
    return Problem(
        ground.global_batch,
        found.model,
        found.profiles,
        tuple(ground.devices),
        lambda _: found.communication,
        stages=_stages(ground),
        shares=settings.shares_for(ground.ranks) if settings.shares is not None else None,
        equal_counts=found.equal_counts,
        for_everyone=_FOR_EVERYONE,
    )


def planned(ground: PrepareContext, problem: Problem) -> Plan:
    """The plan that rank 0 makes, on every rank."""
    said = together(ground, lambda: make_plan(problem).to_json() if ground.rank == 0 else None)
    plan = Plan.from_json(said[0])
    shown = " + ".join(map(str, plan.split.batches))
    say(ground, f"stage {plan.stage}, batches {shown}, a step should take {plan.step_s * 1e3:.0f} ms")
    return plan


def stored(ground: PrepareContext) -> Plan:
    """The plan that was given, or is in the file that was named; rank 0 reads it."""
    given = ground.settings.plan
    if isinstance(given, Plan):
        _check_stored(ground, given, "the plan")
        return given
    file = str(given)
    said = together(ground, lambda: _read(file).to_json() if ground.rank == 0 else None)
    plan = Plan.from_json(said[0])
    _check_stored(ground, plan, f'choice="{file}"')
    return plan


def size_of(ground: PrepareContext) -> ModelSize:
    """What the model holds, and its fingerprint."""
    unit_bytes = ground.settings.unit_bytes_for(3, ground.devices)
    units = units_of(ground.model, unit_bytes, ground.whole)
    largest = max(unit.bytes for unit in units)
    precision = str(ground.settings.described()["precision"])
    with torch.random.fork_rng(devices=[]):  # datasets may draw at random
        sample = ground.feed.sample()
    return model_size(ground.model, ground.optimizer, largest, sample, precision)


def hosts_of(ground: PrepareContext) -> list[str]:
    """The host of every rank."""
    return [location.host for location in ground.group.endpoint.locations] if ground.group else [""]


def together(ground: PrepareContext, act: Callable[[], Any]) -> list[Any]:
    """What each rank's `act` gives, on every rank; what goes wrong on one is raised by all."""
    raised: Exception | None = None
    found = None
    try:
        found = act()
    except Exception as error:  # noqa: BLE001 (the others wait for word of it, then it is raised)
        raised = error
    said = (str(raised) or type(raised).__name__) if raised else ""
    messages = ground.exchange.all({"error": said, "found": found})
    if raised and not isinstance(raised, UserError):
        raise raised
    for rank, message in enumerate(messages):
        if message["error"]:
            where = f"rank {rank}: " if ground.ranks > 1 and not message["error"].startswith("rank") else ""
            raise UserError(where + message["error"])
    return [message["found"] for message in messages]


def _profile(ground: PrepareContext, size: ModelSize, neighbours: int, sharers: int) -> Profile:
    assert ground.loss
    # Samples that other processes make ahead cost nothing here; those made in the loop are a part of its time.
    fetch = lru_cache(maxsize=1)(ground.feed.sample) if ground.feed.hides_loading else ground.feed.sample
    subject = ProfileTarget(
        ground.model,
        ground.optimizer,
        ground.loss,
        fetch,
        ground.device,
        ground.context,
        size.fingerprint,
        ground.precision,
        size.unit_bytes,
        circumstances=_circumstances(ground),
    )
    limits = Limits(_most(ground), neighbours=neighbours, sharers=sharers)
    if is_limited(ground.device):
        give_back_at_once()
    with batchnorm.alone(ground.model, StepTimer()) if ground.norms else nullcontext():
        return cached_measure(subject, limits, _progress(ground))


def _circumstances(ground: PrepareContext) -> str:
    """What else changes the curves of a model, as far as one can see it."""
    eager = [name for name, module in ground.model.named_modules() if getattr(module, "gradient_checkpointing", False)]
    defaults = {key: str(value) for key, value in ground.optimizer.defaults.items()}
    facts = [
        str(ground.model),
        eager,
        is_compiled(ground.model),
        ground.norms,
        ground.feed.hides_loading,
        code_fingerprint(ground.model, ground.loss, ground.feed.dataset),
        defaults,
    ]
    return repr([*facts, torch.get_float32_matmul_precision()])


def _around(ground: PrepareContext) -> tuple[int, int]:
    """How many ranks share this one's memory, and how many the limit that was set to it; itself included."""
    host = hosts_of(ground)[ground.rank]
    memory = device_identity(ground.device)
    said = ground.exchange.all({"memory": [host, memory], "limit": [host, memory, limiting_group()]})
    mine = said[ground.rank]
    return tuple(sum(each[key] == mine[key] for each in said) for key in ("memory", "limit"))


def _most(ground: PrepareContext) -> int:
    """No micro-batch of this rank can be larger."""
    given = ground.settings.micro_batch
    limit = given[ground.rank] if isinstance(given, Sequence) else given
    return min(ground.global_batch, limit or ground.global_batch)


def _stages(ground: PrepareContext) -> tuple[int, ...]:
    """Those that this model and this optimizer can be trained in."""
    if ground.ranks == 1:
        return (0,)
    if ground.settings.stage != "auto":
        return (int(ground.settings.stage),)
    try:
        check_elementwise(ground.optimizer, 1)
    except UserError:
        return (0,)
    return STAGES[:3] if is_compiled(ground.model) else STAGES


def _read(name: str) -> Plan:
    try:
        text = Path(name).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        words = '"profile", "online" or the name of a file that `mimatrix plan --output` wrote'
        raise UserError(f'choice="{name}" cannot be read ({error}); use {words}') from None
    return Plan.from_text(text, f'choice="{name}"')


def _check_stored(ground: PrepareContext, plan: Plan, name: str) -> None:
    if complaint := misfit(plan, ground.devices):
        raise UserError(f"{name} {complaint}")
    if plan.global_batch != ground.global_batch:
        raise UserError(
            f"{name} is for a global batch of {plan.global_batch} and global_batch is {ground.global_batch}; "
            "make them agree"
        )
    if plan.model and plan.model != size_of(ground).fingerprint:
        raise UserError(
            f"{name} was made for another model, optimizer or precision; measure this one: mimatrix profile script.py"
        )
    if plan.stage not in _stages(ground):
        raise UserError(f"{name} is for stage {plan.stage}, which this run cannot be trained in; make another plan")


def say(ground: PrepareContext, sentence: str) -> None:
    """A line for the person, once."""
    if ground.rank == 0 and not ground.settings.quiet:
        sys.stderr.write(f"mimatrix: {sentence}\n")


def _progress(ground: PrepareContext) -> Callable[[float], None]:
    """A line that moves, for a person who watches."""
    if ground.rank or ground.settings.quiet or not sys.stderr.isatty():
        return lambda _: None

    def show(done: float) -> None:
        sys.stderr.write(f"\rmimatrix: measuring {done:4.0%}" + ("\r\033[K" if done >= 1 else ""))
        sys.stderr.flush()

    return show
