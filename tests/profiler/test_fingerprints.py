"""Fingerprints differ if measured curves would."""

from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from torch import nn

from mimatrix.profiler import code_fingerprint, device_fingerprint, model_fingerprint

CPU = torch.device("cpu")


def test_fingerprints_of_models_differ_if_their_curves_would() -> None:
    def named(width: int = 4, precision: str = "fp32", sample: object = None, frozen: bool = False) -> str:
        model = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width)).requires_grad_(not frozen)
        return model_fingerprint(model, torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1), sample, precision)

    batch = {"x": [torch.zeros(1, 4)], "y": 3}
    longer = {"x": [torch.zeros(1, 5)], "y": 3}
    found = [named(), named(5), named(precision="bf16"), named(sample=batch), named(sample=longer), named(frozen=True)]
    assert len(set(found)) == len(found)
    assert named() == named()
    assert all(len(each) == 16 for each in found)


SOURCES = """
from torch import nn
class Net(nn.Linear):
    def forward(self, x):
        return {0}
def loss(model, batch):
    return {1}
"""


def test_fingerprints_of_code_differ_if_its_source_does(tmp_path: Path) -> None:
    def found(number: int, forward: str = "x", loss: str = "1", dataset: object = ()) -> str:
        file = tmp_path / f"written_{number}.py"
        file.write_text(SOURCES.format(forward, loss))
        spec = spec_from_file_location(file.stem, file)
        assert spec
        assert spec.loader
        module = module_from_spec(spec)
        spec.loader.exec_module(module)
        return code_fingerprint(module.Net(2, 2), partial(module.loss), dataset)

    plain = found(1)
    assert plain == found(2)
    assert plain != found(3, forward="x + x")
    assert plain != found(4, loss="2")
    assert plain != found(5, dataset=code_fingerprint)


def test_fingerprints_of_devices_depend_on_free_memory_and_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = device_fingerprint(CPU, 1_000_000_000)
    assert plain == device_fingerprint(CPU, 1_010_000_000)
    assert plain != device_fingerprint(CPU, 2_000_000_000)
    monkeypatch.setenv("MIMATRIX_SPEED", "0.5")
    assert plain != device_fingerprint(CPU, 1_000_000_000)
