"""Three unequal parts of one GPU (CUDA MPS, 60/25/10 % with 64/16/8 GB): the even split, the plan, and the ideal.

`python -m bench.planned_gpu OUT.json [resnet] [gpt]` on a machine with an NVIDIA GPU, torchvision and transformers.
The ideal is the sum of what the three do side by side without communication, each at its best batch size.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.allreduce.gpu import PERCENT
from mimatrix.core.units import parse_bytes
from mimatrix.lab import GpuPart, collect_gpu, mps_daemon

MEMORY = ("64G", "16G", "8G")
ROUNDS = int(os.environ.get("ROUNDS", "2"))
SECONDS = 8.0
GLOBAL_BATCH = {"resnet": 1024, "gpt": 128}
EVEN_MICRO = {"resnet": 64, "gpt": 2}
ALONE = {"resnet": ((256, 128, 64), (384, 192, 96)), "gpt": ((16, 6, 2), (32, 7, 3))}
"""Batch sizes that are tried for the ideal, one for each part."""
WAYS = ("alone", "even", "planned")
NAMES = {"resnet": "ResNet-50, bf16, channels last", "gpt": "GPT-2 124M, 1,024 tokens, bf16"}


def main(out: Path, models: list[str]) -> None:
    """Measure each way in turn, in several rounds. The file is docs/measurements/heterogeneous/gpu.json."""
    rows = []
    with mps_daemon() as daemon:
        for model in models:
            rounds = [{way: ranks_of(daemon, model, way) for way in WAYS} for _ in range(ROUNDS)]
            rows.append(summary(model, rounds))
            out.write_text(
                json.dumps({"rounds": ROUNDS, "percent": PERCENT, "memory": MEMORY, "models": rows}, indent=1) + "\n"
            )
    print(json.dumps(rows, indent=1))


def summary(model: str, rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Return medians over rounds, and the plan of the last round."""
    alone = [
        statistics.median(found["alone"][rank]["samples_per_s"] for found in rounds) for rank in range(len(PERCENT))
    ]
    last = rounds[-1]["planned"]
    return {
        "name": NAMES[model],
        "global_batch": GLOBAL_BATCH[model],
        "alone": alone,
        "ideal": sum(alone),
        "even": statistics.median(found["even"][0]["samples_per_s"] for found in rounds),
        "planned": statistics.median(found["planned"][0]["samples_per_s"] for found in rounds),
        "stage": last[0]["stage"],
        "micro": [each["micro"] for each in last],
        "predicted_step_s": statistics.median(found["planned"][0]["predicted_s"] for found in rounds),
        "measured_step_s": statistics.median(found["planned"][0]["measured_s"] for found in rounds),
        "planning_s": statistics.median(found["planned"][0]["prepared_s"] for found in rounds),
        "changes": len(last[0]["changes"]),
    }


def ranks_of(daemon: dict[str, str], model: str, way: str) -> list[dict[str, Any]]:
    """Run three ranks once; return the figures of each."""
    parts = [GpuPart(percent, parse_bytes(f"{memory}iB")) for percent, memory in zip(PERCENT, MEMORY, strict=True)]
    words = [sys.executable, "-m", "bench.planned_gpu", "rank", model, way]
    with tempfile.TemporaryDirectory() as cache:
        more = {"MIMATRIX_ARENA": "768MiB", "MIMATRIX_CACHE": cache, "BEGIN": str(time.time() + 25)}
        ranks = collect_gpu(parts, words, env=more, daemon=daemon, timeout_s=180)
    sys.stderr.write("".join(rank.stderr for rank in ranks))
    if any(rank.returncode for rank in ranks):
        raise SystemExit(f"{model} {way}: exit codes {[rank.returncode for rank in ranks]}")
    found = [json.loads(rank.stdout.splitlines()[-1]) for rank in ranks]
    print(model, way, json.dumps(found), flush=True)
    return found


def rank_alone(model: str, way: str) -> dict[str, Any]:
    """Measure as one rank; return its figures."""
    import torch

    torch.cuda.set_device(0)
    made, loss, collate = {"resnet": resnet, "gpt": gpt}[model]()
    if way == "alone":
        return plain(model, made, loss, collate)
    return train_planned(model, way, made, loss, collate)


def plain(model: str, made: Any, loss: Any, collate: Any) -> dict[str, Any]:
    """Train by a plain loop on one device while the others do the same; return the best of several batch sizes."""
    import torch

    made.cuda()
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-4, fused=True)
    rates = {}
    for number, sizes in enumerate(ALONE[model]):
        size = sizes[int(os.environ["RANK"])]
        batch = collate(range(size))

        def step(batch: Any = batch) -> None:
            with torch.autocast("cuda", torch.bfloat16):
                found = loss(made, batch)
            found.backward()
            optimizer.step()
            optimizer.zero_grad()

        # All begin together, however long one took to get here.
        time.sleep(max(0.0, float(os.environ.get("BEGIN", "0")) + number * 2 * SECONDS - time.time()))
        rates[size] = size * rate(step, torch.cuda.synchronize)
    return {"samples_per_s": max(rates.values()), "rates": rates}


def rate(step: Callable[[], None], settle: Callable[[], None]) -> float:
    """Return steps per second, after several to warm up."""
    for _ in range(5):
        step()
    settle()
    started, steps = time.perf_counter(), 0
    while time.perf_counter() - started < SECONDS:
        for _ in range(3):
            step()
        settle()
        steps += 3
    return steps / (time.perf_counter() - started)


def train_planned(model: str, way: str, made: Any, loss: Any, collate: Any) -> dict[str, Any]:
    """Train with the engine, evenly or planned; batch norm over the samples of a rank, as in other systems."""
    import torch

    import mimatrix

    batch = GLOBAL_BATCH[model]
    more = {"micro_batch": EVEN_MICRO[model]} if way == "even" else {"plan": "profile"}
    run = mimatrix.init(global_batch=batch, precision="bf16", sync_batchnorm=False, timeout_s=120, **more)
    optimizer: Any = torch.optim.AdamW(made.parameters(), lr=1e-4, fused=True)
    started = time.perf_counter()
    made, optimizer, loader = run.prepare(
        made, optimizer, range(batch * 1000), loss=loss, collate_fn=collate, pin_memory=False
    )
    prepared_s = time.perf_counter() - started
    times: list[float] = []
    began = time.perf_counter()
    for each in loader:
        run.backward(loss(made, each))
        optimizer.step()
        if run.in_batch:
            continue
        times.append(time.perf_counter())
        # Rank 0 says when to stop; all hear it in the same step.
        late = torch.tensor([float(time.perf_counter() - began > 3 * SECONDS)])
        torch.distributed.broadcast(late, 0)
        if bool(late):
            break
    steps = times[len(times) // 3 :]
    measured = (steps[-1] - steps[0]) / (len(steps) - 1)
    return {
        "samples_per_s": batch / measured,
        "measured_s": measured,
        "predicted_s": run.plan.step_s if run.plan else None,
        "prepared_s": prepared_s,
        "stage": run.stage,
        "micro": run.split.to_json()[run.rank],
        "changes": [(step, plan.split.batches, why) for step, plan, why in run.plan_changes],
    }


def resnet() -> tuple[Any, Any, Any]:
    """Return ResNet-50 and pictures that are on the GPU already."""
    import torch
    from torchvision.models import resnet50

    torch.manual_seed(0)
    pictures = torch.randn(GLOBAL_BATCH["resnet"], 3, 224, 224, device="cuda").to(memory_format=torch.channels_last)
    labels = torch.randint(0, 1000, (len(pictures),), device="cuda")

    def loss(model: Any, pair: Any) -> Any:
        return torch.nn.functional.cross_entropy(model(pair[0]).float(), pair[1])

    model = resnet50(weights=None).to(memory_format=torch.channels_last)
    return model, loss, lambda rows: (pictures[: len(rows)], labels[: len(rows)])


def gpt() -> tuple[Any, Any, Any]:
    """Return GPT-2 in its smallest size, with sequences of 1024."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    tokens = torch.randint(0, 50257, (GLOBAL_BATCH["gpt"], 1024), device="cuda")

    def loss(model: Any, rows: Any) -> Any:
        logits = model(rows).logits[:, :-1].float()
        return torch.nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), rows[:, 1:].reshape(-1))

    return GPT2LMHeadModel(GPT2Config()), loss, lambda rows: tokens[: len(rows)]


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        print(json.dumps(rank_alone(sys.argv[2], sys.argv[3])), flush=True)
    else:
        main(Path(sys.argv[1]), sys.argv[2:] or ["resnet", "gpt"])
