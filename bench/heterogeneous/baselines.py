"""The competitors: each trains the same model on the same global batches until the meter says that it is over."""

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bench.heterogeneous.tasks import Meter, TrainingTask
from bench.heterogeneous.workload import Rows, collate, loss_of, model_of, optimizer_of

FOREVER = 1 << 30
Way = Callable[[TrainingTask, Rows, Meter], None]
Step = Callable[[torch.Tensor], None]


def ddp(task: TrainingTask, rows: Rows, meter: Meter) -> None:
    """Train with DistributedDataParallel on Gloo, equal batches."""
    _ddp(task, rows, meter, _even(task))


def hand_tuned(task: TrainingTask, rows: Rows, meter: Meter) -> None:
    """Train with DDP, batches in proportion to speeds that are known, and the loss weighted to match."""
    ends = [round(task.global_batch * part / sum(task.speeds)) for part in accumulate(task.speeds, initial=0.0)]
    _ddp(task, rows, meter, [stop - start for start, stop in pairwise(ends)])


def accelerate(task: TrainingTask, rows: Rows, meter: Meter) -> None:
    """Train with Accelerate, equal batches."""
    accelerator = _peer("accelerate").Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*_build(task))
    _loop(task, rows, meter, _even(task), model, _steps(optimizer, accelerator.backward))


def fabric(task: TrainingTask, rows: Rows, meter: Meter) -> None:
    """Train with Lightning Fabric and its DDP strategy, equal batches."""
    runs = _peer("lightning_fabric").Fabric(accelerator="cpu", devices=task.ranks, strategy="ddp")
    runs.launch()
    model, optimizer = runs.setup(*_build(task))
    _loop(task, rows, meter, _even(task), model, _steps(optimizer, runs.backward))


def fsdp2(task: TrainingTask, rows: Rows, meter: Meter) -> None:
    """Train with `fully_shard` on each layer, on Gloo, equal batches."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (task.ranks,))
    model = model_of(task)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    _loop(task, rows, meter, _even(task), model, _steps(optimizer_of(task, model)))


def deepspeed(task: TrainingTask, rows: Rows, meter: Meter) -> None:
    """Train with DeepSpeed on Gloo, stage 0, equal batches."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    peer = _peer("deepspeed")
    peer.init_distributed(dist_backend="gloo")
    model, optimizer = _build(task)
    config = {
        "train_batch_size": task.global_batch,
        "train_micro_batch_size_per_gpu": task.global_batch // task.ranks,
        "zero_optimization": {"stage": 0},
    }
    engine, *_ = peer.initialize(model=model, optimizer=optimizer, config=config)

    def step(loss: torch.Tensor) -> None:
        engine.backward(loss)
        engine.step()

    _loop(task, rows, meter, _even(task), engine, step)


def mimatrix_even(task: TrainingTask, rows: Rows, meter: Meter) -> None:
    """Train with MiMatrix without a plan: equal batches."""
    _mimatrix(task, rows, meter)


def mimatrix_planned(task: TrainingTask, rows: Rows, meter: Meter) -> None:
    """Train with MiMatrix as intended: it measures, plans, and follows speeds that change."""
    _mimatrix(task, rows, meter, plan="profile")


WAYS: dict[str, Way] = {
    "ddp": ddp,
    "accelerate": accelerate,
    "fabric": fabric,
    "fsdp2": fsdp2,
    "deepspeed": deepspeed,
    "hand-tuned ddp": hand_tuned,
    "mimatrix even": mimatrix_even,
    "mimatrix": mimatrix_planned,
}


def _mimatrix(task: TrainingTask, rows: Rows, meter: Meter, **settings: Any) -> None:
    import mimatrix

    run = mimatrix.init(global_batch=task.global_batch, quiet=True, **settings)
    meter.record.began_s = meter.clock()
    model, optimizer, loader = run.prepare(*_build(task), rows, loss=loss_of, shuffle=False, collate_fn=collate)
    summed = 0.0
    for _ in run.epochs(FOREVER):
        # A rank without data has no turn in the loop below, and finds out here that the others have left it.
        if meter.is_over(run.step):
            break
        for batch in loader:
            loss = loss_of(model, batch)
            run.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            summed += float(loss.detach()) * len(batch[0])
            if not run.in_batch:
                if not meter.ends_step(summed):
                    break
                summed = 0.0
    plan = getattr(run, "plan", None)
    if plan is not None:
        meter.record.plan = plan.to_json()
    run.close()


def _ddp(task: TrainingTask, rows: Rows, meter: Meter, batches: Sequence[int]) -> None:
    dist.init_process_group("gloo")
    plain, optimizer = _build(task)
    model = nn.parallel.DistributedDataParallel(plain)
    # DDP takes the mean over ranks; each must count by its samples.
    weight = batches[meter.rank] * task.ranks / task.global_batch
    _loop(task, rows, meter, batches, model, _steps(optimizer, lambda loss: torch.autograd.backward(loss * weight)))


def _loop(task: TrainingTask, rows: Rows, meter: Meter, batches: Sequence[int], model: Any, step: Step) -> None:
    """Train with batches that are split once at the start."""
    first, count = sum(batches[: meter.rank]), batches[meter.rank]
    done, continues = 0, True
    while continues:
        loss = loss_of(model, rows.part(task, done, first, count))
        step(loss)
        continues = meter.ends_step(float(loss.detach()) * count)
        done += 1
    if dist.is_initialized():
        dist.destroy_process_group()


def _steps(optimizer: Any, backward: Callable[[torch.Tensor], Any] = torch.autograd.backward) -> Step:
    def step(loss: torch.Tensor) -> None:
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _build(task: TrainingTask) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = model_of(task)
    return model, optimizer_of(task, model)


def _even(task: TrainingTask) -> list[int]:
    assert task.global_batch % task.ranks == 0, "equal batches need a global batch that the ranks divide"
    return [task.global_batch // task.ranks] * task.ranks


def _peer(package: str) -> Any:
    """Import a package that only this comparison needs, and that type checkers need not find."""
    return import_module(package)
