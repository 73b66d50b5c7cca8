"""The loop of PyTorch's tutorial on FSDP2, for any backend: a Transformer, sharded layer by layer, saved and loaded.

`torchrun ... fsdp2.py BACKEND OUTPUT` leaves the final full parameters, and the counters where there are any.
"""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

WORDS, WIDTH, LENGTH = 32, 16, 8
State = dict[str, torch.Tensor]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.feed_forward_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.feed_forward = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.attention_norm(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        y: torch.Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return y


class TutorialTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.output = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        y: torch.Tensor = self.output(self.norm(x))
        return y


def sharded(policy: MixedPrecisionPolicy, mesh: object = None) -> TutorialTransformer:
    torch.manual_seed(0)
    model = TutorialTransformer().double()
    for layer in model.layers:
        fully_shard(layer, mp_policy=policy, mesh=mesh)  # type: ignore[call-overload]
    fully_shard(model, mp_policy=policy, mesh=mesh)  # type: ignore[call-overload]
    assert isinstance(model, FSDPModule)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> None:
    generator = torch.Generator().manual_seed(10 + dist.get_rank())
    for _ in range(steps):
        tokens = torch.randint(0, WORDS, (4, LENGTH), generator=generator)
        loss = model(tokens).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()


def full(model: nn.Module) -> State:
    """Return the state dict with every DTensor gathered, by a collective on each."""
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def load(model: nn.Module, state: State) -> None:
    """Every rank takes its shards of a full state dict."""
    own = model.state_dict()
    shards = {
        name: nn.Parameter(distribute_tensor(value, own[name].device_mesh, own[name].placements))
        for name, value in state.items()
    }
    model.load_state_dict(shards, assign=True)


def trained_with_checkpoint(folder: Path, policy: MixedPrecisionPolicy, name: str) -> State:
    model = sharded(policy)
    train(model, torch.optim.Adam(model.parameters(), lr=1e-2))
    state = full(model)
    if dist.get_rank() == 0:
        torch.save(state, folder / f"{name}.checkpoint")
    dist.barrier()
    another = sharded(policy)
    load(another, torch.load(folder / f"{name}.checkpoint", mmap=True, weights_only=True, map_location="cpu"))
    train(another, torch.optim.Adam(another.parameters(), lr=1e-2))
    return full(another)


def on_two_dimensions() -> State:
    """Sharded in rows of a mesh of ranks, replicated in its columns."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(MixedPrecisionPolicy(), mesh)
    train(model, torch.optim.Adam(model.parameters(), lr=1e-2))
    return full(model)


def main(backend: str, output: Path) -> None:
    dist.init_process_group(backend)
    torch.set_num_threads(1)
    reduced = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    states = {
        "full": trained_with_checkpoint(output.parent, MixedPrecisionPolicy(), "full"),
        "mixed": trained_with_checkpoint(output.parent, reduced, "mixed"),
        "mesh": on_two_dimensions(),
    }
    found = {f"{name} {key}": value for name, state in states.items() for key, value in state.items()}
    if dist.get_rank() == 0:
        torch.save({"parameters": found, "counters": getattr(dist.group.WORLD, "counters", {})}, output)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
