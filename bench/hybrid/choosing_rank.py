"""One rank of a scenario: `mode="auto"` first, for some seconds, then the mode that it did not choose.

Says in JSON what was chosen, and how many samples a second each mode made.
"""

import faulthandler
import json
import os
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import TensorDataset

import mimatrix
from mimatrix.engine.run import Run
from mimatrix.hybrid.auto import Undecided

_WARM_UPS, _TRIED = 3, 3
_SAMPLES = 2048
_PATIENCE_S = 180.0


def net(words: str) -> tuple[nn.Module, torch.Tensor]:
    """`mlp:512x5`: width and depth; `conv:16x3`: channels and depth, on pictures of 16 x 16. With samples for it."""
    kind, _, sizes = words.partition(":")
    width, depth = map(int, sizes.split("x"))
    if kind == "mlp":
        layers: list[nn.Module] = [nn.Linear(64, width), nn.ReLU()]
        for _ in range(depth - 1):
            layers += [nn.Linear(width, width), nn.ReLU()]
        return nn.Sequential(*layers, nn.Linear(width, 10)), torch.randn(_SAMPLES, 64)
    layers = [nn.Conv2d(1, width, 3, padding=1), nn.ReLU()]
    for _ in range(depth - 1):
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.ReLU()]
    last = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)]
    return nn.Sequential(*layers, *last), torch.randn(_SAMPLES, 1, 16, 16)


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    """Cross entropy."""
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def trained(run: Run, words: str, seconds: float) -> None:
    """Train for about so long, and say how many samples a second that made."""
    torch.manual_seed(0)
    made, inputs = net(words)
    sgd = torch.optim.SGD(made.parameters(), lr=0.01, momentum=0.9)
    data = TensorDataset(inputs, torch.randint(10, (_SAMPLES,)))
    model, optimizer, loader = run.prepare(made, sgd, data, loss=loss_of)
    if isinstance(run, Undecided):
        _say_choice(run)
    late, began, done, last = [], 0.0, 0, 1 << 30
    while done < last:
        for batch in loader:
            run.backward(loss_of(model, batch))
            optimizer.step()
            optimizer.zero_grad()
            if run.in_batch:
                continue
            done += 1
            if done == _WARM_UPS:
                began = time.perf_counter()
            if done == _WARM_UPS + _TRIED:
                last = done + _agreed(run, max(5, round(seconds * _TRIED / (time.perf_counter() - began))))
                began = time.perf_counter()
            if done > _WARM_UPS + _TRIED:
                late.append(run.pushing.staleness if run.pushing else 0.0)
            if done == last:
                break
    took = time.perf_counter() - began
    if run.rank == 0:
        per_s = len(late) * (run.settings.global_batch or 0) / took
        _say(mode=run.mode, group=run.group, samples_per_s=per_s, staleness=sum(late) / len(late), seconds=took)
    run.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def _agreed(run: Run, steps: int) -> int:
    """As many as the first rank of the run says."""
    if run.ranks == 1:
        return steps
    store = dist.distributed_c10d._get_default_store()
    if run.rank == 0:
        store.set("bench/steps", str(steps))
    return int(store.get("bench/steps"))


def _say_choice(run: Undecided) -> None:
    choice = run.choice
    assert choice
    if int(os.environ["RANK"]) == 0:
        apart = choice.apart
        assert apart
        predicted = {"sync": choice.together.samples_per_s, "hybrid": apart.samples_per_s}
        figures = {
            "overlaps": apart.overlaps,
            "staleness": apart.staleness,
            "computing_s": [group.plan.step_s for group in apart.groups],
            "moving_s": [group.moving_s for group in apart.groups],
            "cycle_s": [group.cycle_s for group in apart.groups],
            "step_s": choice.together.step_s,
            "communication_s": choice.together.communication_s,
        }
        _say(chosen=choice.mode, reason=choice.reason, predicted=predicted, worth=apart.worth_per_s, figures=figures)


def _say(**found: Any) -> None:
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


def main() -> None:
    """`choosing_rank NET BATCH SECONDS`."""
    words, batch, seconds = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
    faulthandler.dump_traceback_later(_PATIENCE_S, exit=True)  # who waits, and where
    torch.set_num_threads(1)
    auto = mimatrix.init(batch, mode="auto", quiet=True)
    assert isinstance(auto, Undecided)
    trained(auto, words, seconds)
    assert auto.choice
    assert auto.choice.apart
    # Below what the kernel gives away: nobody else of the namespace listens there.
    os.environ["MASTER_PORT"] = "29600"
    if auto.choice.mode == "sync":
        other = mimatrix.init(batch, mode=mimatrix.Hybrid(overlaps=auto.choice.apart.overlaps), quiet=True)
    else:
        other = mimatrix.init(batch, plan=auto.choice.together, quiet=True)
    trained(other, words, seconds)


if __name__ == "__main__":
    main()
