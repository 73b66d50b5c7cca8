"""A GAN by two calls of `mimatrix.init`, under torchrun or alone; says with which weights it ends."""

import json

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

import mimatrix


def judge(scores: torch.Tensor, is_real: bool) -> torch.Tensor:
    return functional.binary_cross_entropy_with_logits(scores, torch.full_like(scores, float(is_real)))


def main() -> None:
    run_g, run_d = (mimatrix.init(global_batch=6, stage=0, device="cpu", quiet=True) for _ in range(2))
    torch.manual_seed(3)
    generator = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6)).double()
    discriminator = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    noise, real = torch.randn(24, 4, dtype=torch.float64), torch.randn(24, 6, dtype=torch.float64) + 2
    adam_g, adam_d = (torch.optim.Adam(model.parameters(), lr=1e-2) for model in (generator, discriminator))
    _, optimizer_g, loader_g = run_g.prepare(generator, adam_g, noise)
    _, optimizer_d, loader_d = run_d.prepare(discriminator, adam_d, real)
    for _ in zip(run_g.epochs(2), run_d.epochs(2), strict=True):
        for batch_g, batch_d in zip(loader_g, loader_d, strict=True):
            fake = generator(batch_g).detach()
            run_d.backward(judge(discriminator(batch_d), True) + judge(discriminator(fake), False))
            optimizer_d.step()
            optimizer_d.zero_grad()
            discriminator.requires_grad_(False)
            run_g.backward(judge(discriminator(generator(batch_g)), True))
            discriminator.requires_grad_(True)
            optimizer_g.step()
            optimizer_g.zero_grad()
    weights = [param.detach().flatten() for model in (generator, discriminator) for param in model.parameters()]
    if run_g.rank == 0:
        print(json.dumps(torch.cat(weights).tolist()))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
