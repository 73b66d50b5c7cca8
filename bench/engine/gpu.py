"""One process on one GPU: the engine next to a plain loop, ResNet-50 and a GPT of 124 million parameters in bf16.

`python -m bench.engine.gpu OUT.json` on a machine with an NVIDIA GPU, torchvision and transformers.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import mimatrix

TURNS, STEPS = 24, 10
Loss = Callable[[nn.Module, Any], torch.Tensor]


def resnet() -> tuple[nn.Module, Any, Loss]:
    """Return ResNet-50 with 128 pictures."""
    from torchvision.models import resnet50

    made: nn.Module = resnet50(weights=None)
    batch = (torch.randn(128, 3, 224, 224, device="cuda"), torch.randint(0, 1000, (128,), device="cuda"))
    return made, batch, lambda model, pair: nn.functional.cross_entropy(model(pair[0]).float(), pair[1])


def gpt() -> tuple[nn.Module, Any, Loss]:
    """Return GPT-2 in its smallest size, with 8 sequences of 1024."""
    from transformers import GPT2Config, GPT2LMHeadModel

    made: nn.Module = GPT2LMHeadModel(GPT2Config())
    batch = torch.randint(0, 50257, (8, 1024), device="cuda")

    def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        logits = model(tokens).logits[:, :-1].float()
        return nn.functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), tokens[:, 1:].reshape(-1))

    return made, batch, loss


def plain(made: Callable[[], tuple[nn.Module, Any, Loss]]) -> Iterator[None]:
    """Return the step that a user would write by hand."""
    model, batch, loss = made()
    model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    while True:
        with torch.autocast("cuda", torch.bfloat16):
            found = loss(model, batch)
        found.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        yield


def ours(made: Callable[[], tuple[nn.Module, Any, Loss]]) -> Iterator[None]:
    """Return the same step through the engine."""
    model, batch, loss = made()
    size = len(batch[0]) if isinstance(batch, tuple) else len(batch)
    run = mimatrix.init(global_batch=size, precision="bf16", quiet=True)
    model.cuda()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    rows = list(range(100 * size))
    model, optimizer, loader = run.prepare(
        model, optimizer, rows, loss=loss, collate_fn=lambda _: batch, pin_memory=False
    )
    for _ in run.epochs(1 << 20):
        for each in loader:
            found = loss(model, each)
            run.backward(found)
            optimizer.step()
            optimizer.zero_grad()
            run.log(loss=found)
            yield


def main(out: Path) -> None:
    """Measure ten steps at a time, the two alternating."""
    result: dict[str, Any] = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__}
    for name, made in (("ResNet-50", resnet), ("GPT, 124M", gpt)):
        ways = {"plain": plain(made), "engine": ours(made)}
        times: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(TURNS + 3):
            for way in ways if turn % 2 else list(ways)[::-1]:
                torch.cuda.synchronize()
                started = time.perf_counter()
                for _ in range(STEPS):
                    next(ways[way])
                torch.cuda.synchronize()
                if turn >= 3:
                    times[way].append((time.perf_counter() - started) / STEPS)
        result[name] = {way: statistics.quantiles(took, n=4) for way, took in times.items()}
        medians = {way: result[name][way][1] for way in ways}
        print(name, medians, "engine / plain", medians["engine"] / medians["plain"], flush=True)
        del ways
        torch.cuda.empty_cache()
    out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
