"""Run the ranks of every configuration: `python ranks.py CONFIGURATIONS RESULTS`, with the checkout to record on PYTHONPATH.

It is started by path and imports nothing of `bench`, so that it can record any checkout. Each rank is a process of its own,
forked from this one after torch was imported, and uses the public interface of `mimatrix` only.
"""

import contextlib
import hashlib
import importlib
import inspect
import io
import json
import multiprocessing
import os
import platform
import runpy
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

import mimatrix

VOCABULARY, LENGTH, WIDTH = 17, 6, 16
SMALL_SAMPLES = 37
"""Not a multiple of the global batch: the last one of an epoch is smaller."""
TIMEOUT_S = 180.0
_FORK = multiprocessing.get_context("fork")


class ConvNet(nn.Module):
    """Two convolutions, each with batch norm; the second keeps a cumulative average."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.first_norm = nn.Conv2d(2, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.second, self.second_norm = nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6, momentum=None)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits of each picture."""
        x = F.relu(self.first_norm(self.first(x)))
        x = F.relu(self.second_norm(self.second(x)))
        logits: torch.Tensor = self.head(x.mean((2, 3)))
        return logits


class Block(nn.Module):
    """One block of a transformer, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp_norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the hidden states after attention and MLP."""
        query, key, value = self.qkv(self.norm(x)).chunk(3, dim=-1)
        weights = torch.softmax(query @ key.transpose(1, 2) / WIDTH**0.5, dim=-1)
        x = x + F.dropout(self.out(weights @ value), 0.1, self.training)
        hidden: torch.Tensor = x + F.dropout(self.down(F.gelu(self.up(self.mlp_norm(x)))), 0.1, self.training)
        return hidden


class TiedTransformer(nn.Module):
    """Two blocks under activation checkpointing; the output layer shares the weight of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.output = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits of each position."""
        x = self.embedding(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        logits: torch.Tensor = self.output(self.norm(x))
        return logits


def classification_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the mean cross-entropy of a batch of inputs and classes."""
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets)


def language_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """Return the mean cross-entropy of the next token."""
    (tokens,) = batch
    return F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def example() -> tuple[nn.Module, torch.optim.Optimizer, TensorDataset, Callable[..., torch.Tensor], int]:
    """Return model and data of `examples/train.py`, in float64."""
    torch.manual_seed(0)
    inputs = torch.randn(2000, 20, dtype=torch.float64)
    dataset = TensorDataset(inputs, (inputs[:, :5].sum(1) > 0).long())
    layers = (nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    model = nn.Sequential(*layers).double()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3), dataset, classification_loss, 1


def batch_norm() -> tuple[nn.Module, torch.optim.Optimizer, TensorDataset, Callable[..., torch.Tensor], int]:
    """Return the convolution net and small random pictures."""
    torch.manual_seed(1)
    dataset = TensorDataset(torch.randn(SMALL_SAMPLES, 2, 5, 5), torch.arange(SMALL_SAMPLES) % 3)
    model = ConvNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    return model, optimizer, dataset, classification_loss, 2


def tied() -> tuple[nn.Module, torch.optim.Optimizer, TensorDataset, Callable[..., torch.Tensor], int]:
    """Return the transformer and random tokens."""
    torch.manual_seed(2)
    dataset = TensorDataset(torch.randint(0, VOCABULARY, (SMALL_SAMPLES, LENGTH)))
    model = TiedTransformer()
    matrices = [param for param in model.parameters() if param.dim() > 1]
    vectors = [param for param in model.parameters() if param.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0, "lr": 3e-3}]
    return model, torch.optim.AdamW(groups, lr=1e-2, weight_decay=0.1), dataset, language_loss, 2


TASKS = {"example": example, "batch_norm": batch_norm, "tied": tied}


class ScriptedClock:
    """Whose turn it is: groups step in a fixed order, so that every push meets the same parameters in every run."""

    def __init__(self, turns: list[int], groups: int) -> None:
        self._turns, self._changed = turns, _FORK.Condition()
        self._tick = _FORK.Value("i", 0, lock=False)
        self._left = _FORK.Array("b", groups, lock=False)

    @contextlib.contextmanager
    def turn(self, group: int) -> Iterator[None]:
        """Wait for a turn of `group`, and pass on to the next one at the end."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._next() == group, TIMEOUT_S):
                raise TimeoutError(f"group {group} has waited {TIMEOUT_S:g} s for its turn")
        yield
        with self._changed:
            self._tick.value += 1
            self._changed.notify_all()

    def leave(self, group: int) -> None:
        """Give up all further turns of `group`."""
        with self._changed:
            self._left[group] = 1
            self._changed.notify_all()

    def _next(self) -> int:
        while self._left[self._turns[self._tick.value % len(self._turns)]] and not all(self._left):
            self._tick.value += 1
        return self._turns[int(self._tick.value) % len(self._turns)]


class RecordedRank:
    """One rank of one configuration, in its own process."""

    def __init__(self, config: dict[str, Any], rank: int, clock: ScriptedClock, barrier: Any) -> None:
        self.config, self.rank, self.clock, self.barrier = config, rank, clock, barrier
        groups = config["groups"]
        self.group = next((number for number, ranks in enumerate(groups) if rank in ranks), 0)
        self.leads = rank == (groups[self.group][0] if groups else 0)

    def train(self) -> dict[str, Any]:
        """Train, and return the losses as hex floats with a digest of the final parameters."""
        torch.set_num_threads(1)
        torch.use_deterministic_algorithms(True)
        run, model = self._train_script() if self.config["model"] == "script" else self._train_task()
        losses = [float(means["loss"]).hex() for _, means in run.history]
        digest = sha256_of(run.full_state_dict(model))
        self.barrier.wait()
        run.close()
        self.barrier.wait()
        return {"losses": losses, "parameters": digest}

    def _train_task(self) -> tuple[Any, nn.Module]:
        run = self._init()
        model, optimizer, dataset, loss_fn, epochs = TASKS[self.config["model"]]()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        model, optimizer, loader, scheduler = run.prepare(model, optimizer, dataset, scheduler, loss=loss_fn)
        self.barrier.wait()  # no group pushes before all have pulled
        for _ in run.epochs(epochs):
            for batch in loader:
                loss = loss_fn(model, batch)
                run.backward(loss)
                with self.clock.turn(self.group) if self.config["groups"] and self.leads else contextlib.nullcontext():
                    optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
                run.log(loss=loss)
        if self.leads:
            self.clock.leave(self.group)
        return run, model

    def _init(self) -> Any:
        config = self.config
        batches = config["batches"][self.group]
        more: dict[str, Any] = {}
        if config["micro_batch"]:
            more[init_argument("micro_batch", "micro_batch_size")] = config["micro_batch"]
        if config["max_grad_norm"]:
            more[init_argument("max_grad_norm", "clip_norm")] = config["max_grad_norm"]
        if config["groups"]:
            more["mode"] = mimatrix.Hybrid(groups=config["groups"], policy=config["policy"], options=config["options"])
        return mimatrix.init(
            global_batch=sum(batches),
            batch=list(batches),
            stage=config["stage"],
            plan=None,
            seed=3,
            precision=config["precision"],
            **more,
        )

    def _train_script(self) -> tuple[Any, nn.Module]:
        """Run `examples/train.py` as it is, but without a plan, whatever the default becomes."""
        runs: list[Any] = []
        models: list[nn.Module] = []
        init = mimatrix.init

        def init_without_plan(*arguments: Any, **named: Any) -> Any:
            run = init(*arguments, **{**named, "plan": None})
            prepare = run.prepare

            def prepare_and_keep(*arguments: Any, **named: Any) -> Any:
                prepared = prepare(*arguments, **named)
                models.append(prepared[0])
                return prepared

            run.prepare = prepare_and_keep  # type: ignore[method-assign]
            runs.append(run)
            return run

        mimatrix.init = init_without_plan
        batches = ",".join(map(str, self.config["batches"][0]))
        sys.argv = ["train.py", "--stage", str(self.config["stage"]), "--batch", batches, "--epochs", "1"]
        with contextlib.redirect_stdout(io.StringIO()):
            runpy.run_path(self.config["script"], run_name="__main__")
        return runs[0], models[0]


def init_argument(*names: str) -> str:
    """Return which of these names an argument of `mimatrix.init` has in this checkout."""
    return next(name for name in names if name in inspect.signature(mimatrix.init).parameters)


def sha256_of(state: dict[str, torch.Tensor]) -> str:
    """Return a digest of names, types, shapes and bytes of all tensors."""
    digest = hashlib.sha256()
    for name in sorted(state):
        value = state[name].contiguous()
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        digest.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def run_configuration(config: dict[str, Any]) -> dict[str, Any]:
    """Run the ranks of a configuration as processes, and return what the first rank of each group recorded."""
    ranks = config["ranks"]
    clock = ScriptedClock(config["turns"], max(1, len(config["groups"])))
    barrier, answers = _FORK.Barrier(ranks, timeout=TIMEOUT_S), _FORK.SimpleQueue()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    def rank_process(number: int) -> None:
        place = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        os.environ.update({name: str(value) for name, value in place.items()})
        os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
        rank = RecordedRank(config, number, clock, barrier)
        try:
            result = rank.train()
            answers.put((rank.group if rank.leads else -1, result))
        except BaseException:  # noqa: BLE001 (printed; the others are told, and the exit code says it)
            traceback.print_exc()
            barrier.abort()
            os._exit(1)

    processes = [_FORK.Process(target=rank_process, args=(number,), daemon=False) for number in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(TIMEOUT_S)
        if process.is_alive():
            process.kill()
    if any(process.exitcode for process in processes):
        codes = [process.exitcode for process in processes]
        raise SystemExit(f"{config['name']}: the ranks ended with {codes}")
    results = dict(answers.get() for _ in range(ranks))
    recorded = [results[group] for group in sorted(results) if group >= 0]
    return {"losses": [one["losses"] for one in recorded], "parameters": [one["parameters"] for one in recorded]}


def preload() -> None:
    """Import what every rank needs, once, before they are forked."""
    importlib.import_module("torch._dynamo")  # by the first step of an optimizer, which takes a second
    _ = mimatrix.init, mimatrix.Hybrid


def machine() -> dict[str, str]:
    """Return what the recorded bits depend on, besides the code."""
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    return {"torch": torch.__version__, "cpu": cpu, "cpu_capability": torch.backends.cpu.get_cpu_capability()}


def main() -> None:
    """Run all configurations of a file, one after another."""
    config_path, result_path = map(Path, sys.argv[1:])
    assert Path(mimatrix.__file__).is_relative_to(Path.cwd()), "started in the checkout to record, or it is another one"
    preload()
    runs = {}
    for config in json.loads(config_path.read_text()):
        runs[config["name"]] = run_configuration(config)
        print(config["name"], flush=True)
    result_path.write_text(json.dumps({"machine": machine(), "runs": runs}))


if __name__ == "__main__":
    main()
