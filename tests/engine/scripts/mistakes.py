"""Make one mistake on purpose: `mistakes.py NAME STAGE [BEGAN]`. The line that is to blame is marked with its name.

Each rank writes the time at which it begins to the file BEGAN.RANK. `mistakes.py --list` prints the names.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

import mimatrix

Mistake = Callable[[], None]
MISTAKES: dict[str, Mistake] = {}
torch.set_num_threads(1)
torch.manual_seed(0)
data = [(torch.randn(4, dtype=torch.float64), number % 2) for number in range(16)]
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
sgd = torch.optim.SGD(model.parameters(), lr=0.1)
run: Any = None


def mistake(function: Mistake) -> Mistake:
    MISTAKES[function.__name__] = function
    return function


def prepared(**settings: Any) -> tuple[Any, Any]:
    _, optimizer, loader = run.prepare(model, sgd, data, loss=loss_fn, **settings)
    return optimizer, loader


def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def metric_fn(model: nn.Module, batch: Any) -> dict[str, Any]:
    return {"loss": loss_fn(model, batch)}


def train(optimizer: Any, loader: Any, after: Callable[[], None] = lambda: None) -> None:
    for batch in loader:
        run.backward(loss_fn(model, batch))
        optimizer.step()
        optimizer.zero_grad()
        after()


@mistake
def plain_backward() -> None:
    _, loader = prepared()
    for batch in loader:
        loss_fn(model, batch).backward()  # type: ignore[no-untyped-call]  # plain_backward


@mistake
def no_step() -> None:
    _, loader = prepared()
    for batch in loader:  # no_step
        run.backward(loss_fn(model, batch))


@mistake
def no_backward() -> None:
    _, loader = prepared()
    for batch in loader:  # no_backward
        loss_fn(model, batch)


@mistake
def step_first() -> None:
    optimizer, loader = prepared()
    for _ in loader:
        optimizer.step()  # step_first


@mistake
def two_backwards() -> None:
    _, loader = prepared()
    for batch in loader:
        run.backward(loss_fn(model, batch))
        run.backward(loss_fn(model, batch) if run.stage < 3 else torch.ones((), requires_grad=True))  # two_backwards


@mistake
def clip_norm() -> None:
    optimizer, loader = prepared()
    for batch in loader:
        run.backward(loss_fn(model, batch))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # clip_norm
        optimizer.step()


@mistake
def clip_value() -> None:
    optimizer, loader = prepared()
    for batch in loader:
        run.backward(loss_fn(model, batch))
        nn.utils.clip_grad_value_(model.parameters(), 1.0)  # clip_value
        optimizer.step()


@mistake
def grad_scaler() -> None:
    optimizer, loader = prepared()
    scaler = torch.amp.GradScaler("cpu")
    for batch in loader:
        run.backward(scaler.scale(loss_fn(model, batch)))
        scaler.step(optimizer)  # grad_scaler


@mistake
def own_accumulation() -> None:
    optimizer, loader = prepared()
    for number, batch in enumerate(loader):  # own_accumulation
        run.backward(loss_fn(model, batch) / 4)
        if number % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()


@mistake
def reading_ahead() -> None:
    optimizer, loader = prepared()
    batches = iter(loader)
    last = next(batches)
    for batch in batches:  # reading_ahead
        run.backward(loss_fn(model, last))
        optimizer.step()
        last = batch


@mistake
def zero_grad_first() -> None:
    optimizer, loader = prepared()
    for batch in loader:
        run.backward(loss_fn(model, batch))
        optimizer.zero_grad()  # zero_grad_first
        optimizer.step()


@mistake
def other_dataset() -> None:
    run.prepare(model, sgd, data[: 16 - 4 * run.rank])  # other_dataset


@mistake
def other_model() -> None:
    other = nn.Linear(4, 2 + run.rank).double()
    run.prepare(other, torch.optim.SGD(other.parameters(), lr=0.1), data)  # other_model


@mistake
def other_evaluation() -> None:
    prepared()
    run.evaluate(model, data[: 16 - 4 * run.rank], metric_fn)  # other_evaluation


@mistake
def evaluate_on_rank_0() -> None:
    optimizer, loader = prepared()
    train(optimizer, loader)
    if run.rank == 0:
        run.evaluate(model, data, metric_fn)  # evaluate_on_rank_0
    train(optimizer, loader)


@mistake
def evaluate_on_rank_0_at_the_end() -> None:
    optimizer, loader = prepared()
    train(optimizer, loader)
    if run.rank == 0:
        run.evaluate(model, data, metric_fn)  # evaluate_on_rank_0_at_the_end


@mistake
def state_dict_on_rank_0() -> None:
    optimizer, loader = prepared()
    train(optimizer, loader)
    if run.rank == 0:
        run.full_state_dict(model)  # state_dict_on_rank_0
    train(optimizer, loader)


@mistake
def load_on_rank_0() -> None:
    optimizer, loader = prepared()
    if run.rank == 0:
        run.load(mkdtemp())  # load_on_rank_0
    train(optimizer, loader)


@mistake
def save_on_rank_0() -> None:
    optimizer, loader = prepared()
    train(optimizer, loader)
    if run.rank == 0:
        run.save(mkdtemp(), wait=True)  # save_on_rank_0
    train(optimizer, loader)


@mistake
def model_on_rank_0() -> None:
    optimizer, loader = prepared()
    train(optimizer, loader)
    if run.rank == 0:
        model(torch.ones(1, 4, dtype=torch.float64))  # model_on_rank_0
    train(optimizer, loader)


@mistake
def break_on_rank_0() -> None:
    optimizer, loader = prepared()
    for batch in loader:
        run.backward(loss_fn(model, batch))
        optimizer.step()
        if run.rank == 0:
            break
    run.evaluate(model, data, metric_fn)  # break_on_rank_0


@mistake
def evaluate_in_a_batch() -> None:
    _, loader = prepared()
    for batch in loader:
        run.backward(loss_fn(model, batch))
        run.evaluate(model, data, metric_fn)  # evaluate_in_a_batch


@mistake
def log_a_word() -> None:
    optimizer, loader = prepared()
    train(optimizer, loader, lambda: run.log(note="hello"))  # log_a_word


@mistake
def log_a_vector() -> None:
    optimizer, loader = prepared()
    train(optimizer, loader, lambda: run.log(v=torch.ones(3)))  # log_a_vector


@mistake
def unknown_scheduler() -> None:
    optimizer, loader = prepared()
    scheduler = StepLR(optimizer, 1)
    for batch in loader:
        run.backward(loss_fn(model, batch))
        optimizer.step()  # unknown_scheduler
        scheduler.step()


@mistake
def list_of_schedulers() -> None:
    run.prepare(model, sgd, data, [StepLR(sgd, 1)])  # list_of_schedulers


@mistake
def closure() -> None:
    optimizer, loader = prepared()
    for batch in loader:
        run.backward(loss_fn(model, batch))
        optimizer.step(lambda: 0.0)  # closure


@mistake
def given_optimizer() -> None:
    _, loader = prepared()
    for batch in loader:
        run.backward(loss_fn(model, batch))
        sgd.step()  # given_optimizer


@mistake
def other_learning_rate() -> None:
    optimizer, loader = prepared()
    for batch in loader:
        run.backward(loss_fn(model, batch))
        optimizer.param_groups[0]["lr"] = 0.1 + run.rank
        optimizer.step()  # other_learning_rate


class Sharded(IterableDataset[Any]):
    """Gives each rank other samples, as WebDataset's split_by_node does."""

    def __iter__(self) -> Iterator[Any]:
        return iter(data[run.rank :: run.world_size])


@mistake
def sharded_stream() -> None:
    _, optimizer, loader = run.prepare(model, sgd, Sharded())
    train(optimizer, loader)


@mistake
def distributed_sampler() -> None:
    sampler: Any = DistributedSampler(data, num_replicas=2, rank=run.rank)  # type: ignore[arg-type]
    run.prepare(model, sgd, DataLoader(data, batch_size=4, sampler=sampler))  # type: ignore[arg-type] # distributed_sampler


@mistake
def strange_user_state() -> None:
    optimizer, loader = prepared()
    train(optimizer, loader)
    run.save(mkdtemp(), user_state={"model": object()})  # strange_user_state


@mistake
def misspelt_setting() -> None:
    run.prepare(model, sgd, data, num_worker=2)  # misspelt_setting


@mistake
def averaged_model() -> None:
    ema = AveragedModel(model)
    optimizer, loader = prepared()
    train(optimizer, loader, lambda: ema.update_parameters(model))  # averaged_model


@mistake
def save_nowhere() -> None:
    optimizer, loader = prepared()
    train(optimizer, loader)
    run.save("/proc/nope", wait=True)  # save_nowhere


@mistake
def save_nowhere_at_the_end() -> None:
    optimizer, loader = prepared()
    train(optimizer, loader)
    run.save("/proc/nope")  # save_nowhere_at_the_end


if __name__ == "__main__":
    if sys.argv[1] == "--list":
        print(*MISTAKES, sep="\n")
        raise SystemExit
    stage: Any = int(sys.argv[2])
    batch = [3, 1] if os.environ.get("WORLD_SIZE") == "2" else [4]
    run = mimatrix.init(global_batch=4, batch=batch, micro_batch=4, stage=stage, quiet=True)
    if len(sys.argv) > 3:
        Path(f"{sys.argv[3]}.{run.rank}").write_text(str(time.time()))
    MISTAKES[sys.argv[1]]()
