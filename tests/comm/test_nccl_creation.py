"""NCCL's process group is created with settings of its own, which the rest of the process never sees."""

import os
from datetime import timedelta
from typing import Any, NoReturn

import pytest
from torch._C import _distributed_c10d
from torch._C._distributed_c10d import HashStore

from mimatrix.comm.nccl import create_nccl

HANDLING, MONITORING = "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING"


class FakeProcessGroupNCCL:
    """Remembers the environment in which it was created, as NCCL's reads it there."""

    class Options:
        _timeout = timedelta(0)

    def __init__(self, store: Any, rank: int, world_size: int, options: Options) -> None:
        self.ranks, self.timeout, self.environment = (rank, world_size), options._timeout, dict(os.environ)


class FailingProcessGroupNCCL(FakeProcessGroupNCCL):
    """Finds no GPU."""

    def __init__(self, *arguments: Any) -> None:
        self._fail()

    def _fail(self) -> NoReturn:
        raise ValueError("ProcessGroupNCCL is only supported with GPUs")


def create(monkeypatch: pytest.MonkeyPatch, kind: type[FakeProcessGroupNCCL]) -> FakeProcessGroupNCCL:
    monkeypatch.setattr(_distributed_c10d, "ProcessGroupNCCL", kind, raising=False)
    created = create_nccl(HashStore(), 1, 3, timedelta(seconds=20))
    assert isinstance(created, FakeProcessGroupNCCL)
    return created


def test_environment_is_changed_only_while_nccl_is_created(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HANDLING, "1")
    monkeypatch.delenv(MONITORING, raising=False)
    before = dict(os.environ)
    created = create(monkeypatch, FakeProcessGroupNCCL)
    assert created.environment[HANDLING] == "2", "a lost rank does not end the process"
    assert created.environment[MONITORING] == "0"
    assert created.environment.keys() - before.keys() <= {name for name in created.environment if "TORCH_NCCL" in name}
    assert dict(os.environ) == before


def test_environment_is_restored_when_nccl_cannot_be_created(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(HANDLING, "1")
    before = dict(os.environ)
    with pytest.raises(ValueError, match="only supported with GPUs"):
        create(monkeypatch, FailingProcessGroupNCCL)
    assert dict(os.environ) == before


def test_watchdog_of_torch_waits_longer_than_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    created = create(monkeypatch, FakeProcessGroupNCCL)
    assert created.ranks == (1, 3)
    assert created.timeout >= timedelta(seconds=50)
