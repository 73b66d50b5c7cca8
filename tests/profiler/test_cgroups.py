"""Limits of control groups, as /proc and the cgroup file systems show them."""

from pathlib import Path

from mimatrix.profiler.cgroups import cpu_quota, memory_left_bytes


def process(folder: Path, groups: str, *mounts: str) -> Path:
    """Write what /proc tells of a process in these groups."""
    (folder / "cgroup").write_text(groups)
    (folder / "mountinfo").write_text("\n".join(mounts))
    return folder


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)
    return folder


def test_limits_of_cgroups_version_1(tmp_path: Path) -> None:
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
    assert memory_left_bytes(found) == 350
    assert cpu_quota(found) == 0.25


def test_limits_of_cgroups_version_2_in_a_container(tmp_path: Path) -> None:
    mount = write(tmp_path / "groups", memory__max="3000", memory__current="1000", cpu__max="150000 100000")
    write(mount / "mine", memory__max="max", memory__current="1", cpu__max="max 100000")
    line = f"30 23 0:26 /docker/abc {mount} rw - cgroup2 cgroup2 rw"
    assert memory_left_bytes(process(tmp_path, "0::/docker/abc/mine\n", line)) == 2000
    assert cpu_quota(tmp_path) == 1.5
    assert memory_left_bytes(process(tmp_path, "0::/\n", line)) == 2000


def test_a_process_without_cgroups_has_no_limits(tmp_path: Path) -> None:
    assert memory_left_bytes(tmp_path) is None
    assert cpu_quota(tmp_path) is None
