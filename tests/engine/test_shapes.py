"""Training scripts in the shapes that people write: N uneven ranks give what a plain loop of torch gives, to 1e-10."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from support.features import ALONE, PAIR, STAGES, THREE, UNIT_BYTES, assert_same
from support.models import LENGTH, WORDS, Residual, Transformer, cross_entropy, images, sentences, token_cross_entropy
from support.runs import in_runs
from support.two_runs import in_two_runs
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence
from torch.optim import lr_scheduler
from torch.utils.data import default_collate

from mimatrix.engine.run import Run

SIZE, EPOCHS = 5, 3
State = dict[str, torch.Tensor]
SPLITS: dict[str, dict[str, Any]] = {"alone": ALONE, "pair": PAIR, "three": THREE}
AT_ONCE = {name: {**split, "micro_batch": None} for name, split in SPLITS.items()}
"""One micro-batch on each rank, as batch norm needs it to see the whole batch."""
FEW = [("pair", 0), ("three", 1), ("alone", 2), ("three", 3)]


def combinations(stages: Sequence[int] = STAGES, few: Sequence[tuple[str, int]] = FEW) -> pytest.MarkDecorator:
    """Return every split in every stage; all but a few take part in `make long` only."""
    every = [(split, stage) for split in SPLITS for stage in stages]
    marks = {each: () if each in few else (pytest.mark.long,) for each in every}
    return pytest.mark.parametrize(("split", "stage"), [pytest.param(*each, marks=marks[each]) for each in every])


def build(kind: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return kind().double()


def batches(data: Sequence[Any], collate: Callable[[list[Any]], Any] = default_collate) -> list[Any]:
    """Return the global batches of an epoch, of which the last may be smaller."""
    return [collate(list(data[start : start + SIZE])) for start in range(0, len(data), SIZE)]


def check(
    kind: Callable[[], nn.Module],
    plain: Callable[[nn.Module], Any],
    train: Callable[[Run, nn.Module], Any],
    split: dict[str, Any],
    stage: int,
    **settings: Any,
) -> None:
    """Check that `train` on ranks ends with the model, and returns what `plain` does in one process."""
    expected = build(kind)
    figures = plain(expected)
    models = [build(kind) for _ in split["batch"]]

    def on_rank(run: Run) -> tuple[State, Any]:
        model = models[run.rank]
        told = train(run, model)
        return run.full_state_dict(model), told

    more = {"unit_bytes": UNIT_BYTES, **split, **settings}
    for state, told in in_runs(len(split["batch"]), on_rank, stage=stage, **more):
        assert_same(state, expected.state_dict(), 1e-10)
        assert told == pytest.approx(figures, abs=1e-10)


class Convolutions(nn.Module):
    """The network of torch's MNIST example, made small, with dropout off."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1)
        self.dropout1, self.dropout2 = nn.Dropout(0.0), nn.Dropout(0.0)
        self.fc1, self.fc2 = nn.Linear(24, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.conv2(functional.relu(self.conv1(x))))
        x = self.dropout1(functional.max_pool2d(x, 2)).flatten(1)
        x = self.dropout2(functional.relu(self.fc1(x)))
        return functional.log_softmax(self.fc2(x), dim=1)


def nll(model: nn.Module, batch: Any) -> torch.Tensor:
    return functional.nll_loss(model(batch[0]), batch[1])


@combinations()
def test_mnist_with_adadelta_and_a_schedule_by_epoch_is_exact(split: str, stage: int) -> None:
    data = images(13)

    def parts(model: nn.Module) -> tuple[torch.optim.Optimizer, lr_scheduler.StepLR]:
        optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)
        return optimizer, lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)

    def plain(model: nn.Module) -> list[float]:
        optimizer, scheduler = parts(model)
        lr = []
        for _ in range(EPOCHS):
            for batch in batches(data):
                optimizer.zero_grad()
                nll(model, batch).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
            scheduler.step()
            lr += scheduler.get_last_lr()
        return [float(rate) for rate in lr]

    def train(run: Run, model: nn.Module) -> list[float]:
        optimizer, scheduler = parts(model)
        model, prepared, loader, scheduled = run.prepare(model, optimizer, data, scheduler, shuffle=False)
        lr = []
        for _ in run.epochs(EPOCHS):
            for batch in loader:
                prepared.zero_grad()
                run.backward(nll(model, batch))
                prepared.step()
            scheduled.step()
            lr += scheduled.get_last_lr()
        return [float(rate) for rate in lr]

    check(Convolutions, plain, train, SPLITS[split], stage)


def accuracy(model: nn.Module, batch: Any) -> dict[str, Any]:
    scores, targets = model(batch[0]), batch[1]
    top2 = (scores.topk(2).indices == targets[:, None]).any(1)
    return {
        "loss": functional.cross_entropy(scores, targets),
        "acc1": (scores.argmax(1) == targets).double().mean(),
        "acc2": top2.double().mean(),
    }


@combinations()
def test_imagenet_with_batch_norm_warm_up_and_cosine_is_exact(split: str, stage: int) -> None:
    data, held_out = images(15), images(23)[15:]

    def parts(model: nn.Module) -> tuple[torch.optim.Optimizer, lr_scheduler.SequentialLR]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2)
        warm_up = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
        cosine = lr_scheduler.CosineAnnealingLR(optimizer, T_max=6)
        return optimizer, lr_scheduler.SequentialLR(optimizer, [warm_up, cosine], [3])

    def plain(model: nn.Module) -> dict[str, float]:
        optimizer, scheduler = parts(model)
        for _ in range(EPOCHS):
            for batch in batches(data):
                cross_entropy(model, batch).backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step()
        model.eval()
        with torch.no_grad():
            means = accuracy(model, default_collate(held_out))
        return {name: float(value) for name, value in means.items()}

    def train(run: Run, model: nn.Module) -> dict[str, float]:
        optimizer, scheduler = parts(model)
        model, prepared, loader, scheduled = run.prepare(
            model, optimizer, data, scheduler, loss=cross_entropy, shuffle=False
        )
        for _ in run.epochs(EPOCHS):
            for batch in loader:
                run.backward(cross_entropy(model, batch))
                prepared.step()
                prepared.zero_grad()
                scheduled.step()
        return run.evaluate(model, held_out, accuracy)

    check(Residual, plain, train, AT_ONCE[split], stage)


def by_hand(step: int) -> float:
    """Return nanoGPT's rate: warm up, then cosine."""
    return 1e-2 * (step + 1) / 3 if step < 2 else 1e-3 + 0.5 * (1 + math.cos(math.pi * (step - 2) / 8)) * 9e-3


@combinations()
def test_nanogpt_with_accumulation_clipping_and_rates_by_hand_is_exact(split: str, stage: int) -> None:
    """The word vectors are tied to the head; matrices alone have weight decay."""
    data = [sentence.clamp(min=1) for sentence in sentences(15)]

    def decayed(model: nn.Module) -> torch.optim.Optimizer:
        params = list(model.parameters())
        groups = [
            {"params": [param for param in params if param.dim() >= 2], "weight_decay": 0.1},
            {"params": [param for param in params if param.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-6)

    def plain(model: nn.Module) -> list[float]:
        optimizer, losses = decayed(model), []
        for step, batch in enumerate(batches(data) * EPOCHS):
            for group in optimizer.param_groups:
                group["lr"] = by_hand(step)
            optimizer.zero_grad()
            # Accumulated in micro-batches, as nanoGPT does it.
            losses.append(0.0)
            for row in batch:
                loss = token_cross_entropy(model, row[None]) / len(batch)
                loss.backward()  # type: ignore[no-untyped-call]
                losses[-1] += float(loss.detach())
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        return losses

    def train(run: Run, model: nn.Module) -> list[float]:
        model, optimizer, loader = run.prepare(model, decayed(model), data, shuffle=False)
        for _ in run.epochs(EPOCHS):
            for batch in loader:
                for group in optimizer.param_groups:
                    group["lr"] = by_hand(run.step)
                loss = token_cross_entropy(model, batch)
                run.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                run.log(loss=loss)
        return [means["loss"] for _, means in run.history]

    check(Transformer, plain, train, SPLITS[split], stage, max_grad_norm=0.5)


def padded(rows: list[torch.Tensor]) -> torch.Tensor:
    """Pad to the longest of a micro-batch only."""
    return pad_sequence(rows, batch_first=True)


@combinations()
def test_lengths_that_differ_with_padding_by_micro_batch_are_exact(split: str, stage: int) -> None:
    """Every token counts the same, whichever micro-batch it is in."""
    generator = torch.Generator().manual_seed(9)
    lengths = torch.randint(1, LENGTH + 1, (14,), generator=generator).tolist()
    data = [torch.randint(1, WORDS, (length,), generator=generator) for length in lengths]

    def plain(model: nn.Module) -> list[float]:
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
        for batch in batches(data, padded) * EPOCHS:
            loss = token_cross_entropy(model, batch)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses

    def train(run: Run, model: nn.Module) -> list[float]:
        adamw = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model, optimizer, loader = run.prepare(model, adamw, data, shuffle=False, collate_fn=padded)
        for _ in run.epochs(EPOCHS):
            for batch in loader:
                tokens = float((batch != 0).sum())
                loss = token_cross_entropy(model, batch)
                run.backward(loss, weight=tokens)
                optimizer.step()
                optimizer.zero_grad()
                run.log(loss=loss)
        return [means["loss"] for _, means in run.history]

    check(Transformer, plain, train, SPLITS[split], stage)


GAN_SPLITS: dict[str, dict[str, Any]] = {
    "alone": {"batch": [5]},
    "pair": {"batch": [3, 2], "shares": [0.7, 0.3]},
    "three": {"batch": [1, 1, 3], "shares": [0.2, 0.8, 0.0]},
}


def generator_and_discriminator() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(3)
    generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))
    return generator.double(), nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.2), nn.Linear(8, 1)).double()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.5, 0.999))


def judge(scores: torch.Tensor, is_real: bool) -> torch.Tensor:
    return functional.binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(is_real)))


def discriminator_loss(
    generator: nn.Module, discriminator: nn.Module, noise: torch.Tensor, real: torch.Tensor
) -> torch.Tensor:
    with torch.no_grad():
        fake = generator(noise)
    return judge(discriminator(real), True) + judge(discriminator(fake), False)


@combinations(stages=range(3), few=[("three", 0), ("pair", 2)])
def test_gan_of_two_runs_and_two_optimizers_is_exact(split: str, stage: int) -> None:
    """Each network has its own run; the discriminator is frozen while the generator learns from it."""
    draws = torch.Generator().manual_seed(4)
    noise = [torch.randn(4, generator=draws, dtype=torch.float64) for _ in range(15)]
    real = [torch.randn(6, generator=draws, dtype=torch.float64) + 2 for _ in range(15)]
    expected = generator_and_discriminator()

    def plain(generator: nn.Module, discriminator: nn.Module) -> None:
        optimizer_g, optimizer_d = adam(generator), adam(discriminator)
        for batch_g, batch_d in zip(batches(noise) * EPOCHS, batches(real) * EPOCHS, strict=True):
            optimizer_d.zero_grad()
            discriminator_loss(generator, discriminator, batch_g, batch_d).backward()  # type: ignore[no-untyped-call]
            optimizer_d.step()
            optimizer_g.zero_grad()
            judge(discriminator(generator(batch_g)), True).backward()  # type: ignore[no-untyped-call]
            optimizer_g.step()

    plain(*expected)
    pairs = [generator_and_discriminator() for _ in GAN_SPLITS[split]["batch"]]

    def on_rank(run_g: Run, run_d: Run) -> tuple[State, State]:
        generator, discriminator = pairs[run_g.rank]
        _, optimizer_g, loader_g = run_g.prepare(generator, adam(generator), noise, shuffle=False)
        _, optimizer_d, loader_d = run_d.prepare(discriminator, adam(discriminator), real, shuffle=False)
        for _ in zip(run_g.epochs(EPOCHS), run_d.epochs(EPOCHS), strict=True):
            for batch_g, batch_d in zip(loader_g, loader_d, strict=True):
                run_d.backward(discriminator_loss(generator, discriminator, batch_g, batch_d))
                optimizer_d.step()
                optimizer_d.zero_grad()
                discriminator.requires_grad_(False)
                run_g.backward(judge(discriminator(generator(batch_g)), True))
                discriminator.requires_grad_(True)
                optimizer_g.step()
                optimizer_g.zero_grad()
        return run_g.full_state_dict(generator), run_d.full_state_dict(discriminator)

    results = in_two_runs(len(pairs), on_rank, stage=stage, unit_bytes=UNIT_BYTES, **GAN_SPLITS[split])
    for states in results:
        for state, model in zip(states, expected, strict=True):
            assert_same(state, model.state_dict(), 1e-10)


@pytest.mark.long
def test_gan_by_two_inits_gives_under_torchrun_what_it_gives_alone(tmp_path: Path) -> None:
    def weights(*launcher: str) -> list[float]:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", *launcher, str(Path(__file__).parent / "scripts" / "gan.py")],
            env=os.environ | {"OMP_NUM_THREADS": "1", "MIMATRIX_CACHE": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        values: list[float] = json.loads(done.stdout.splitlines()[-1])
        return values

    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert weights(*torchrun) == pytest.approx(weights(), abs=1e-10)
