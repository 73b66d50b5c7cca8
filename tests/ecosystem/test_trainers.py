"""transformers.Trainer, Accelerate and Lightning under torchrun, on backend `mimatrix` and on Gloo: the same script."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPTS = Path(__file__).parent / "scripts"
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
NEEDS = {
    "trainer": ("transformers", "accelerate"),
    "accelerate_loop": ("transformers", "accelerate"),
    "lightning_fit": ("lightning",),
}


def need(*packages: str) -> None:
    """Skip a test if what it runs is not installed."""
    for package in packages:
        if find_spec(package) is None:
            pytest.skip(f"needs {package}: run `make ecosystem`")


def torchrun(script: str, folder: Path, *arguments: str) -> dict[str, Any]:
    """Run a script on two ranks; return what it prints at its end."""
    folder.mkdir()
    done = subprocess.run(
        [*TORCHRUN, str(SCRIPTS / f"{script}.py"), *arguments, str(folder)],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "MIMATRIX_CACHE": str(folder / "cache")},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    told: dict[str, Any] = json.loads(next(line for line in done.stdout.splitlines() if line.startswith('{"')))
    return told


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize("script", NEEDS)
def test_trainer_gives_the_results_of_gloo(script: str, tmp_path: Path) -> None:
    """Losses, metrics and weights are equal to the last bit: two ranks have one order to sum in."""
    need(*NEEDS[script])
    expected, told = (torchrun(script, tmp_path / backend, backend) for backend in ("gloo", "mimatrix"))
    assert (expected.pop("backend"), told.pop("backend")) == ("gloo", "mimatrix")
    assert len(told["history"]) >= 3
    assert told == expected
    weights, of_gloo = (torch.load(tmp_path / backend / "weights.pt") for backend in ("mimatrix", "gloo"))
    assert weights.keys() == of_gloo.keys()
    assert all(torch.equal(weights[name], of_gloo[name]) for name in of_gloo)


def test_accelerate_is_loaded_as_without_us_but_for_the_backend() -> None:
    """Its choice of a backend is corrected where `mimatrix` was asked for, and nowhere else."""
    need("accelerate")
    code = """
import json, torch
from accelerate.state import PartialState
choose = lambda name: PartialState._prepare_backend(object(), True, False, name)[0]
print(json.dumps([choose(name) for name in (None, "gloo", "mpi", "nccl", "mimatrix")]))
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=os.environ | {"LOCAL_RANK": "0"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert json.loads(done.stdout) == ["gloo", "gloo", "gloo", "gloo", "mimatrix"]
