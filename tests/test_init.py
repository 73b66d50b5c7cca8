"""`mimatrix.init` sets up logging, leaves random seeds alone, and resolves the mode by its name."""

import pytest
import torch

import mimatrix
from mimatrix import _init
from mimatrix.core import environment


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Leave this process's logging and hooks alone; return what would have been called."""
    calls: list[str] = []
    monkeypatch.setattr(_init, "install_excepthook", lambda: calls.append("excepthook"))
    monkeypatch.setattr(_init, "configure_logging", lambda *, quiet: calls.append(f"logging, quiet={quiet}"))
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv(environment.GROUPS.name, raising=False)
    return calls


@pytest.mark.parametrize("quiet", [False, True])
def test_init_configures_logging(calls: list[str], quiet: bool) -> None:
    run = mimatrix.init(global_batch=4, quiet=quiet, device="cpu")
    assert calls == ["excepthook", f"logging, quiet={quiet}"]
    assert (run.rank, run.world_size, run.device) == (0, 1, torch.device("cpu"))


def test_init_names_the_nearest_mode() -> None:
    with pytest.raises(mimatrix.UserError, match='unknown mode "hybird"; did you mean "hybrid"'):
        mimatrix.init(global_batch=4, mode="hybird", device="cpu")


@pytest.mark.parametrize("device", ["xpu", "mps:0", "meta", torch.device("xpu")])
def test_init_refuses_other_devices_than_gpus_of_cuda_and_cpus(device: torch.device | str) -> None:
    with pytest.raises(mimatrix.UserError, match=r'device ".*" is not supported; use device="cuda" or device="cpu"'):
        mimatrix.init(global_batch=4, device=device)


def test_init_refuses_a_device_that_torch_does_not_know() -> None:
    with pytest.raises(mimatrix.UserError, match='unknown device "gpu"; use device="cuda" or device="cpu"'):
        mimatrix.init(global_batch=4, device="gpu")


def test_a_single_process_needs_no_transports() -> None:
    assert mimatrix.init(global_batch=4, device="cpu").transports == ()


def test_init_leaves_the_seed_of_the_script_alone() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(7)
        expected = torch.rand(4).tolist()
        torch.manual_seed(7)
        mimatrix.init(global_batch=4, seed=3, device="cpu")
        assert torch.rand(4).tolist() == expected


def test_init_takes_the_arguments_that_the_readme_shows() -> None:
    run = mimatrix.init(global_batch=4, batch=[4], stage=0, plan=None, mode="sync", seed=1, device="cpu")
    assert (run.settings.global_batch, run.settings.batch, run.stage, run.settings.seed) == (4, [4], 0, 1)
