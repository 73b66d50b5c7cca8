"""Accelerate accepts the backend, however it is imported; shown with a stand-in, so that it need not be installed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

KNOWN = """
class PartialState:
    def _prepare_backend(self, cpu=False, sagemaker_dp=False, backend=None):
        return ("gloo" if cpu else backend or "nccl"), ("MULTI_CPU" if cpu else "MULTI_GPU")
"""
OTHER = "class PartialState: pass"
CHOOSE = """
import json
names = (None, "gloo", "nccl", "mimatrix")
print(json.dumps([PartialState()._prepare_backend(cpu, False, name) for cpu in (True, False) for name in names]))
"""
IMPORTS = {
    "by its entry point": "import torch\nfrom accelerate.state import PartialState",
    "after us": "import mimatrix.comm.registration as r; r.register()\nfrom accelerate.state import PartialState",
    "before us": "from accelerate.state import PartialState\nimport mimatrix.comm.registration as r; r.register()",
}


def run(folder: Path, state: str, code: str, **variables: str) -> str:
    package = folder / "accelerate"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "state.py").write_text(state)
    env = os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"} | variables
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("name", IMPORTS)
def test_accelerate_keeps_its_choice_for_all_other_backends(name: str, tmp_path: Path) -> None:
    autoload = "1" if name == "by its entry point" else "0"
    told = run(tmp_path, KNOWN, IMPORTS[name] + CHOOSE, TORCH_DEVICE_BACKEND_AUTOLOAD=autoload)
    on_cpus = [[backend, "MULTI_CPU"] for backend in ("gloo", "gloo", "gloo", "mimatrix")]
    on_gpus = [[backend, "MULTI_GPU"] for backend in ("nccl", "gloo", "nccl", "mimatrix")]
    assert json.loads(told) == on_cpus + on_gpus


def test_an_unknown_version_of_accelerate_is_left_as_it_is(tmp_path: Path) -> None:
    code = "import torch, sys, accelerate.state as s; print(vars(s.PartialState).keys() & {'_prepare_backend'})"
    assert run(tmp_path, OTHER, code).strip() == "set()"
