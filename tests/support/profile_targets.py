"""Models to measure, and the peak of what their tensors hold, counted in another way."""

import weakref
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mimatrix.profiler import ProfileTarget


def mlp(width: int = 1024, **more: Any) -> ProfileTarget:
    model = nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 10))
    return profile_target(model, (64,), **more)


def convolutions(side: int = 16, **more: Any) -> ProfileTarget:
    """Return a model that leaves traces: running statistics and dropout."""
    first = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Dropout(0.2)]
    second = [nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return profile_target(nn.Sequential(*first, *second, nn.Linear(16, 10)), (3, side, side), **more)


def profile_target(model: nn.Module, shape: tuple[int, ...], device: str = "cpu", **more: Any) -> ProfileTarget:
    where = torch.device(device)
    model.to(where)
    return ProfileTarget(
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=1e-3),
        loss=lambda model, batch: model(batch).square().mean(),
        fetch=lambda samples: torch.randn(samples, *shape, device=where),
        device=where,
        **more,
    )


class PeakCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all tensors that are created in its context, and the most that existed at once."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = {tensor.untyped_storage()._cdata for tensor in model.state_dict().values()}
        self._now = self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self._seen:
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._seen.add(key)
        self._now += size
        self.peak = max(self.peak, self._now)
        weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self._now -= size
