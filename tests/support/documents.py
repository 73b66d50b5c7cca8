"""Plans and profiles as workers send them."""

from typing import Any


def plan(**changes: Any) -> dict[str, Any]:
    """Return a plan of two ranks as its worker sends it."""
    ranks = [
        {"name": f"n/{rank}", "device": "cpu", "busy_s": 0.1, "idle_s": 0.0, "memory_bytes": 10, "room_bytes": 20}
        for rank in range(2)
    ]
    return {
        "mimatrix_plan": 2,
        "stage": 0,
        "global_batch": 8,
        "split": [[4], [4]],
        "shares": [0.5, 0.5],
        "parts": ranks,
        "step_s": 0.1,
        "communication_s": 0.0,
        "reasons": ["equal devices"],
        "left_out": [],
        "within": 0.0,
        "model": "m",
        "version": 1,
        **changes,
    }


def profile(**changes: Any) -> dict[str, Any]:
    """Return the profile of one device as its worker sends it."""
    device = {
        "device": "cpu",
        "model": "m",
        "seconds": [[1, 0.1], [2, 0.2]],
        "memory": [[1, 100.0], [2, 200.0]],
        "room_bytes": 1000,
        "optimizer_s": 0.01,
        "handling_s": [0.0, 0.0, 0.0, 0.0],
        "noise": 0.0,
        "took_s": 1.0,
        "overflows": 0,
    }
    sizes = ("parameters", "parameter_bytes", "gradient_bytes", "optimizer_bytes", "unit_bytes")
    return {
        "mimatrix_profile": 1,
        "model": {"fingerprint": "m", "name": "x"} | dict.fromkeys(sizes, 10),
        "profiles": [device | changes],
        "communication": {"once_s": [0.0] * 4, "round_s": [0.0] * 4, "reason": ""},
        "equal_counts": False,
    }
