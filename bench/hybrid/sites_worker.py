"""One rank of a measurement between sites: `python -m bench.hybrid.sites_worker TURN`, with torchrun's variables."""

import json
import os
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

GROUPS = ((0, 1), (2, 3))
"""The ranks of each site."""
BATCH, HIDDEN, LR = 256, 300, 0.02
_DEADLINE_S = 60.0
Point = tuple[float, float]


@dataclass(frozen=True)
class SiteMode:
    """How the ranks train: synchronously by an algorithm, or sites as groups by a policy."""

    algorithm: str = ""
    policy: str = ""
    options: dict[str, Any] = field(default_factory=dict)
    epochs: int = 1

    @property
    def steps(self) -> int:
        """Steps that a site makes between two meetings with the other one."""
        return int(self.options.get("local_steps", 1))


@dataclass(frozen=True)
class SiteRun:
    """One run of a mode."""

    way: SiteMode
    folder: str
    cache: str
    """Where the tuner keeps what it has measured."""
    seed: int
    every: int
    """Steps between two looks at the accuracy."""

    def to_text(self) -> str:
        """Return the run as text, for the command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> "SiteRun":
        """Read the text of `to_text`."""
        fields = json.loads(text)
        return cls(**fields | {"way": SiteMode(**fields["way"])})


@dataclass
class GroupRecord:
    """The record of one group, by the machine's clock, which all ranks of a lab share."""

    ends_s: list[float] = field(default_factory=list)
    """When each of its steps had ended."""
    staleness: list[float] = field(default_factory=list)
    """Of the last push, after each step; nothing where all ranks go together."""
    curve: list[Point] = field(default_factory=list)
    """(when, accuracy in percent) of the first group's parameters."""


def main(text: str) -> None:
    """Train as the run says; the first rank of each group writes the record."""
    turn = SiteRun.from_text(text)
    os.environ["MIMATRIX_CACHE"] = turn.cache
    if turn.way.algorithm:
        os.environ["MIMATRIX_TRANSPORT"] = f"send_recv {turn.way.algorithm}"
    import torch
    from support.hybrid_tasks import clouds
    from torch import nn

    import mimatrix

    torch.set_num_threads(1)
    task, record = clouds(0), GroupRecord()
    run = mimatrix.init(BATCH, mode=_mode(turn.way), seed=turn.seed, quiet=True, timeout_s=_DEADLINE_S)
    torch.manual_seed(turn.seed)
    net = wide(task.train[0].shape[1], 10)
    sgd = torch.optim.SGD(net.parameters(), lr=LR, momentum=0.9)
    model, optimizer, loader = run.prepare(net, sgd, torch.utils.data.TensorDataset(*task.train), drop_last=True)
    kept: list[tuple[float, dict[str, torch.Tensor]]] = []
    for _ in run.epochs(turn.way.epochs):
        for inputs, targets in loader:
            run.backward(nn.functional.cross_entropy(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            record.ends_s.append(time.monotonic())
            if run.status.pushes:
                record.staleness.append(run.status.pushes.staleness)
            if run.step % turn.every == 0 and run.rank == run.status.group == 0:
                kept.append((record.ends_s[-1], {name: value.clone() for name, value in net.state_dict().items()}))
    run.close()
    # A rank that ends without it takes its memory along, while others over the slow link may still read the last of it.
    torch.distributed.destroy_process_group()
    # Evaluated when no other rank waits for it.
    for when, state in kept:
        net.load_state_dict(state)
        record.curve.append((when, task.accuracy(net)))
    if run.rank == 0:
        (Path(turn.folder) / f"{run.status.group}.json").write_text(json.dumps(asdict(record)))


def wide(inputs: int, outputs: int) -> Any:
    """Build a net whose gradients are large enough for a slow link to matter."""
    from torch import nn

    layers = [nn.Linear(inputs, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, outputs)]
    return nn.Sequential(*layers)


def _mode(way: SiteMode) -> Any:
    import mimatrix

    return mimatrix.Hybrid(groups=GROUPS, policy=way.policy, options=way.options) if way.policy else "sync"


if __name__ == "__main__":
    main(*sys.argv[1:])
