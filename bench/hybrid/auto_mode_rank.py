"""One rank of a scenario: `mode="auto"` first, until an accuracy is reached, then the mode that it did not choose.

Prints as JSON what was chosen, and how long each mode took.
"""

import faulthandler
import json
import os
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import mimatrix
from mimatrix.engine.run import Run
from mimatrix.hybrid.auto_mode import hybrid_mode

_CLASSES, _TRAIN, _TEST = 10, 8192, 1000
_TARGET = 0.9
"""Of the best accuracy that is possible."""
_TRIED, _LOOKS = 4, 20
"""Steps after which it is known how long a step takes, and how many snapshots of the parameters are taken."""
_MOST_SAMPLES = 40_000
"""Of each group: more would change nothing."""
_PATIENCE_S = 240.0
Snapshots = list[tuple[float, dict[str, torch.Tensor]]]


@dataclass(frozen=True)
class CloudTask:
    """Ten clouds that overlap, as rows or as pictures, and a net for them."""

    net: nn.Module
    train: TensorDataset
    test: tuple[torch.Tensor, torch.Tensor]
    best: float
    """The best possible accuracy."""

    def accuracy(self) -> float:
        """Return the accuracy of the net as it is."""
        with torch.no_grad():
            return float((self.net(self.test[0]).argmax(1) == self.test[1]).double().mean())


def build_task(words: str) -> CloudTask:
    """Build the task of `mlp:512x5` (width and depth) or `conv:16x3` (channels and depth, pictures of 16 x 16)."""
    kind, _, sizes = words.partition(":")
    width, depth = map(int, sizes.split("x"))
    torch.manual_seed(0)
    net = _rows_net(width, depth) if kind == "mlp" else _pictures_net(width, depth)
    for layer in net:
        if isinstance(layer, nn.Linear | nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    if kind == "mlp":
        middles = torch.randn(_CLASSES, 64)
    else:  # patches of four by four: what convolutions can see
        middles = torch.kron(torch.randn(_CLASSES, 4, 4), torch.ones(4, 4)).view(_CLASSES, 256)
    # As far apart as they must be for one in ten to be mistaken.
    spread = (2 * middles.shape[1]) ** 0.5 / 4.5
    targets = torch.randint(_CLASSES, (_TRAIN + _TEST,))
    rows = middles[targets] + spread * torch.randn(len(targets), middles.shape[1])
    best = float((torch.cdist(rows[_TRAIN:], middles).argmin(1) == targets[_TRAIN:]).double().mean())
    inputs = rows / spread if kind == "mlp" else (rows / spread).view(-1, 1, 16, 16)
    train = TensorDataset(inputs[:_TRAIN], targets[:_TRAIN])
    return CloudTask(net, train, (inputs[_TRAIN:], targets[_TRAIN:]), best)


def _rows_net(width: int, depth: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Linear(64, width), nn.ReLU()]
    for _ in range(depth - 1):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, _CLASSES))


def _pictures_net(width: int, depth: int) -> nn.Sequential:
    layers: list[nn.Module] = [nn.Conv2d(1, width, 3, padding=1), nn.ReLU()]
    for _ in range(depth - 1):
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AvgPool2d(4), nn.Flatten(), nn.Linear(16 * width, _CLASSES))


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the cross entropy of a batch."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def train(run: Run, words: str, seconds: float) -> None:
    """Train for about `seconds`; print when the target was reached, and the samples per second."""
    task = build_task(words)
    sgd = torch.optim.SGD(task.net.parameters(), lr=0.02, momentum=0.9)
    model, optimizer, loader = run.prepare(task.net, sgd, task.train, loss=loss_of)
    if run.mode_choice:
        _print_choice(run)
    batch_size = run.settings.global_batch or 0
    snapshots: Snapshots = []
    began, done, last, every = 0.0, 0, 0, 1
    while not last or done < last:
        for batch in loader:
            run.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
            if run.in_batch:
                continue
            done = run.step  # of all ranks: this one may have had no samples in some
            began = began or time.perf_counter()
            if not last and done > _TRIED:
                steps = round(seconds * _TRIED / (time.perf_counter() - began))
                steps = _agree_on_steps(run, max(5, min(steps, _MOST_SAMPLES // batch_size)))
                last, every = 1 + _TRIED + steps, max(1, steps // _LOOKS)
            if run.rank == run.status.group == 0 and done % every == 0:
                now = {name: value.detach().clone() for name, value in task.net.state_dict().items()}
                snapshots.append((time.perf_counter() - began, now))
            if done == last:
                break  # all ranks here, and the others are told
    took = time.perf_counter() - began
    if run.rank == 0:
        late = run.status.pushes.staleness if run.status.pushes else 0.0
        rate = (done - 1) * batch_size / took
        reached = _evaluate(task, snapshots) if run.status.group == 0 else {}
        _print_json(
            mode=run.status.mode, group=run.status.group, seconds=took, samples_per_s=rate, staleness=late, **reached
        )
    run.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def _evaluate(task: CloudTask, snapshots: Snapshots) -> dict[str, Any]:
    """Return when the target was reached, if it was. Evaluated afterwards, because evaluating takes time."""
    curve = []
    for at_s, state in snapshots:
        task.net.load_state_dict(state)
        curve.append((round(at_s, 2), round(100 * task.accuracy(), 1)))
    wanted = 100 * _TARGET * task.best
    reached = next((at_s for at_s, accuracy in curve if accuracy >= wanted), None)
    return {"to_target_s": reached, "target": wanted, "curve": curve}


def _agree_on_steps(run: Run, steps: int) -> int:
    """Return the number of steps of the first rank of the run."""
    if run.world_size == 1:
        return steps
    store = dist.distributed_c10d._get_default_store()
    if run.rank == 0:
        store.set("bench/steps", str(steps))
    return int(store.get("bench/steps"))


def _print_choice(run: Run) -> None:
    choice = run.mode_choice
    assert choice
    if int(os.environ["RANK"]) == 0:
        hybrid = choice.hybrid
        assert hybrid
        predicted = {"sync": choice.sync.samples_per_s, "hybrid": hybrid.samples_per_s}
        figures = {
            "overlaps": hybrid.overlaps,
            "local_steps": hybrid.local_steps,
            "staleness": hybrid.staleness,
            "computing_s": [group.plan.step_s for group in hybrid.groups],
            "moving_s": [group.push_s for group in hybrid.groups],
            "cycle_s": [group.cycle_s for group in hybrid.groups],
            "step_s": choice.sync.step_s,
            "communication_s": choice.sync.communication_s,
        }
        _print_json(
            chosen=choice.mode, reason=choice.reason, predicted=predicted, worth=hybrid.worth_per_s, figures=figures
        )


def _print_json(**found: Any) -> None:
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Run `auto_mode_rank NET BATCH SECONDS`."""
    words, batch, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    faulthandler.dump_traceback_later(_PATIENCE_S, exit=True)  # shows where a rank waits
    torch.set_num_threads(1)
    auto = mimatrix.init(batch, mode="auto", quiet=True)
    train(auto, words, seconds)
    assert auto.mode_choice
    assert auto.mode_choice.hybrid
    # Below the ports that the kernel assigns: no other process of the namespace listens there.
    os.environ["MASTER_PORT"] = "29600"
    if auto.mode_choice.mode == "sync":
        other = mimatrix.init(batch, mode=hybrid_mode(auto.mode_choice.hybrid), quiet=True)
    else:
        other = mimatrix.init(batch, plan=auto.mode_choice.sync, quiet=True)
    train(other, words, seconds)


if __name__ == "__main__":
    main()
