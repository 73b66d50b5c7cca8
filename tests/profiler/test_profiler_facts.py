"""What devices and control groups tell: room, quotas, fingerprints."""

from functools import partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest
import torch
from torch import nn

from mimatrix.core.errors import UserError
from mimatrix.profiler import code_fingerprint, device_fingerprint, model_fingerprint, room
from mimatrix.profiler.cgroups import cpu_quota, memory_left
from mimatrix.profiler.memory import OutOfMemory, attempted, resident_bytes
from mimatrix.profiler.memory_budget import mps_limit

CPU = torch.device("cpu")


def process(folder: Path, groups: str, *mounts: str) -> Path:
    """What /proc tells of a process in these groups."""
    (folder / "cgroup").write_text(groups)
    (folder / "mountinfo").write_text("\n".join(mounts))
    return folder


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_version_1(tmp_path: Path) -> None:
    mount = tmp_path / "memory"
    write(mount, memory__limit_in_bytes=str(2**63 - 4096), memory__usage_in_bytes="7")
    write(
        mount / "a", memory__limit_in_bytes="1000", memory__usage_in_bytes="700", memory__stat="total_inactive_file 50"
    )
    write(mount / "a" / "b", memory__limit_in_bytes="5000", memory__usage_in_bytes="100", memory__stat="cache 1")
    processors = write(tmp_path / "cpu", cpu__cfs_quota_us="-1", cpu__cfs_period_us="100000")
    write(processors / "b", cpu__cfs_quota_us="5000", cpu__cfs_period_us="20000")
    found = process(
        tmp_path,
        "4:memory:/a/b\n1:cpu,cpuacct:/b\n",
        f"35 31 0:32 / {mount} rw,relatime - cgroup cgroup rw,memory",
        f"36 31 0:33 / {tmp_path / 'cpu'} rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct",
        "37 31 0:34 / /tmp rw - tmpfs tmpfs rw",
    )
    assert memory_left(found) == 350
    assert cpu_quota(found) == 0.25


def test_version_2_in_a_container(tmp_path: Path) -> None:
    mount = write(tmp_path / "groups", memory__max="3000", memory__current="1000", cpu__max="150000 100000")
    write(mount / "mine", memory__max="max", memory__current="1", cpu__max="max 100000")
    line = f"30 23 0:26 /docker/abc {mount} rw - cgroup2 cgroup2 rw"
    assert memory_left(process(tmp_path, "0::/docker/abc/mine\n", line)) == 2000
    assert cpu_quota(tmp_path) == 1.5
    assert memory_left(process(tmp_path, "0::/\n", line)) == 2000


def test_no_limits(tmp_path: Path) -> None:
    assert memory_left(tmp_path) is None
    assert cpu_quota(tmp_path) is None


def test_room_follows_the_setting_and_the_neighbours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MIMATRIX_MEMORY", raising=False)
    alone = room(CPU)
    assert 0 < room(CPU, neighbours=4) <= alone / 3
    monkeypatch.setenv("MIMATRIX_MEMORY", str(resident_bytes() + 1_000_000_000))
    # Other tests of the process may give back some megabytes meanwhile.
    assert room(CPU) == pytest.approx(900_000_000, rel=0.2)
    monkeypatch.setenv("MIMATRIX_MEMORY", "1MB")
    assert room(CPU) == 0
    monkeypatch.setenv("MIMATRIX_MEMORY", "much")
    with pytest.raises(UserError, match="MIMATRIX_MEMORY"):
        room(CPU)


def test_limits_of_mps() -> None:
    name = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
    assert mps_limit(0, {name: "0=16G"}) == 16 << 30
    assert mps_limit(1, {name: "0=16G,1=800MB"}) == 800 << 20
    assert mps_limit(1, {name: "0=16G"}) is None
    assert mps_limit(0, {}) is None


def test_overflows_are_told_from_other_errors() -> None:
    def fail(error: BaseException) -> None:
        raise error

    for text, lacking in (("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has", 20 << 20), ("bad_alloc", 0)):
        found = attempted(lambda text=text: fail(RuntimeError(text)), CPU)  # type: ignore[misc]
        assert isinstance(found, OutOfMemory)
        assert found.lacking_bytes == lacking
    assert isinstance(attempted(lambda: fail(MemoryError()), CPU), OutOfMemory)
    with pytest.raises(RuntimeError, match="shapes"):
        attempted(lambda: fail(RuntimeError("shapes do not fit")), CPU)
    assert attempted(lambda: 3, CPU) == 3


def test_fingerprints_of_models_differ_where_curves_would() -> None:
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


def test_fingerprints_of_code_differ_where_it_is_written_differently(tmp_path: Path) -> None:
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


def test_fingerprints_of_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = device_fingerprint(CPU, 1_000_000_000)
    assert plain == device_fingerprint(CPU, 1_010_000_000)
    assert plain != device_fingerprint(CPU, 2_000_000_000)
    monkeypatch.setenv("MIMATRIX_SPEED", "0.5")
    assert plain != device_fingerprint(CPU, 1_000_000_000)
