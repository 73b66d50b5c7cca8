"""Made-up nodes, as the server would tell of them."""

from typing import Any

MEMORY = {"A100": 80 << 30, "V100": 16 << 30}


def node(
    name: str,
    devices: int,
    *,
    rack: str = "rack",
    kind: str = "A100",
    jobs: tuple[int | None, ...] = (),
    link: tuple[float, float, float | None] | None = None,
) -> dict[str, Any]:
    """`jobs` have its first devices; `link` is what it receives and sends and can carry in bytes a second."""
    holders = [*jobs, *[None] * (devices - len(jobs))]
    names = ("received_bytes_per_s", "sent_bytes_per_s", "capacity_bytes_per_s")
    return {
        "name": name, "address": f"10.0.0.{sum(name.encode()) % 250 + 1}", "rack": rack, "answers": True,
        "seen_at": "2026-01-01T00:00:00Z",
        "devices": [_device(f"{name}/{number}", kind, job) for number, job in enumerate(holders)],
        "traffic": {"nic": "eth0", **dict(zip(names, link, strict=True))} if link else None,
    }  # fmt: skip


def _device(name: str, kind: str, job: int | None) -> dict[str, Any]:
    use = {
        "busy": 0.5,
        "memory_bytes": 12 << 30,
        "memory_total_bytes": MEMORY[kind],
        "power_w": 300,
        "temperature_c": 61,
    }
    return {
        "name": name, "kind": kind, "memory_bytes": MEMORY[kind], "job": job, "use": use if job else None,
        "moved_bytes_per_s": 3.3e8 if job else None,
    }  # fmt: skip
