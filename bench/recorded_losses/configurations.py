"""The training runs that are recorded: model, ranks, batches, ZeRO stage, precision, mode."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

STAGES = (0, 1, 2, 3)
PRECISIONS = ("fp32", "bf16")
SMALL_BATCHES = {1: (8,), 2: (5, 3), 3: (4, 3, 1), 4: (4, 2, 1, 1)}
"""Samples of each rank, by number of ranks; explicit and uneven."""
EXAMPLE_BATCHES = {1: (64,), 2: (40, 24), 3: (32, 20, 12), 4: (30, 18, 10, 6)}
"""The same for `examples/train.py`, whose global batch is 64."""
GROUPS = {1: ((0,),), 2: ((0,), (1,)), 3: ((0, 1), (2,)), 4: ((0, 1), (2, 3))}
"""Ranks of each group in hybrid mode, by number of ranks."""
MODELS = ("example", "batch_norm", "tied")


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One training run. `batches` are the samples of each rank, in hybrid mode of each rank of its group."""

    model: str
    ranks: int
    batches: tuple[tuple[int, ...], ...]
    """One tuple per group; in synchronous mode there is one."""
    stage: int
    precision: str = "fp32"
    groups: tuple[tuple[int, ...], ...] = ()
    """Ranks of each group in hybrid mode; empty in synchronous mode."""
    turns: tuple[int, ...] = ()
    """The scripted clock of hybrid mode: which group steps next, over and over."""
    policy: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the policy in hybrid mode."""
    micro_batch: int | None = None
    max_grad_norm: float | None = None

    @property
    def name(self) -> str:
        """Return a name that no other configuration has."""
        batches = "/".join(",".join(map(str, group)) for group in self.batches)
        words = [
            self.model,
            f"{self.ranks} rank{'s' if self.ranks > 1 else ''}",
            f"batch {batches}",
            f"stage {self.stage}",
            self.precision,
        ]
        if self.groups:
            words.append(f"hybrid {self.policy}")
        if self.micro_batch:
            words.append(f"micro-batch {self.micro_batch}")
        if self.max_grad_norm:
            words.append(f"clipped to {self.max_grad_norm:g}")
        return ", ".join(words)


def configurations() -> list[Configuration]:
    """Return every run of the record, in the order in which they run."""
    return [*_sync(), *_micro_steps(), *_idle_rank(), *_script(), *_hybrid()]


def batches_for(model: str, ranks: int) -> tuple[int, ...]:
    """Return how many samples each rank takes of a global batch."""
    return (EXAMPLE_BATCHES if model in ("example", "script") else SMALL_BATCHES)[ranks]


def _sync() -> Iterator[Configuration]:
    for model, ranks, stage, precision in itertools.product(MODELS, SMALL_BATCHES, STAGES, PRECISIONS):
        batches = (batches_for(model, ranks),)
        yield Configuration(model=model, ranks=ranks, batches=batches, stage=stage, precision=precision)


def _micro_steps() -> Iterator[Configuration]:
    """Yield runs whose ranks have different numbers of micro-steps, and gradients clipped by their global norm."""
    for model, stage, precision in itertools.product(MODELS, STAGES, PRECISIONS):
        yield Configuration(
            model=model,
            ranks=3,
            batches=(batches_for(model, 3),),
            stage=stage,
            precision=precision,
            micro_batch=8 if model == "example" else 2,
            max_grad_norm=0.25,
        )


def _idle_rank() -> Iterator[Configuration]:
    """Yield runs in which a rank never has data."""
    for model, stage in itertools.product(MODELS, STAGES):
        batches = (40, 0, 24) if model == "example" else (5, 0, 3)
        yield Configuration(model=model, ranks=3, batches=(batches,), stage=stage)


def _script() -> Iterator[Configuration]:
    """Yield runs of `examples/train.py` itself."""
    for ranks, stage in itertools.product(EXAMPLE_BATCHES, STAGES):
        yield Configuration(model="script", ranks=ranks, batches=(EXAMPLE_BATCHES[ranks],), stage=stage)


def _hybrid() -> Iterator[Configuration]:
    """Yield each model, stage and precision on several numbers of ranks.

    Not every combination: each run starts servers, which takes seconds.
    """
    for ranks, stage in itertools.product(GROUPS, STAGES):
        model = MODELS[(ranks + stage) % len(MODELS)]
        is_local = (ranks // 2 + stage) % 2 == 1
        groups = GROUPS[ranks]
        yield Configuration(
            model=model,
            ranks=ranks,
            batches=tuple(batches_for(model, len(group)) for group in groups),
            stage=stage,
            precision=PRECISIONS[(ranks + stage) % len(PRECISIONS)],
            groups=groups,
            turns=(0, 0, 1, 0, 1) if len(groups) > 1 else (0,),
            policy="local" if is_local else "large",
            options={"local_steps": 2} if is_local else {},
        )
