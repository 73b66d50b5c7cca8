"""Measured profiles as files, so that the same model on the same device is not measured twice."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from mimatrix import __version__
from mimatrix.core import environment
from mimatrix.core.cache import cache_folder
from mimatrix.core.errors import MiMatrixError
from mimatrix.core.files import write_atomic
from mimatrix.planner.model.profile import VERSION, Profile
from mimatrix.profiler.device import Limits, measure_device, memory_budget
from mimatrix.profiler.fingerprints import device_fingerprint
from mimatrix.profiler.trial import ProfileTarget

_MAX_NOISE = 0.25
"""Above this the machine was busy: the profile is good enough for now, but not worth storing."""


def cached_measure(
    target: ProfileTarget, limits: Limits, on_progress: Callable[[float], None] = lambda _: None
) -> Profile:
    """Return the profile that was measured before under the same conditions; otherwise measure and store it.

    If `MIMATRIX_FRESH` is set, always measure.
    """
    available_bytes = memory_budget(target, limits)
    path = _path(target, limits.max_samples, available_bytes)
    if (stored := load_profile(path)) and not environment.FRESH.get():
        on_progress(1.0)
        return replace(stored, room_bytes=available_bytes, took_s=0.0)
    profile = measure_device(target, replace(limits, available_bytes=available_bytes), on_progress)
    if profile.noise <= _MAX_NOISE:
        save_profile(path, profile)
    return profile


def load_profile(path: Path) -> Profile | None:
    """Read a profile; return None if there is none or it is damaged."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        return Profile.from_json(fields["profile"]) if fields["version"] == VERSION else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, MiMatrixError):
        return None


def save_profile(path: Path, profile: Profile) -> None:
    """Store a profile; if it cannot be written, it is measured again next time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps({"version": VERSION, "profile": profile.to_json()}, indent=1))
    except OSError:
        return


def _path(target: ProfileTarget, max_samples: int, available_bytes: int) -> Path:
    conditions = [
        target.fingerprint,
        device_fingerprint(target.device, available_bytes),
        max_samples,
        target.precision,
        target.unit_bytes,
        target.conditions,
        [torch.__version__, __version__, VERSION],
    ]
    name = hashlib.blake2b(json.dumps(conditions).encode(), digest_size=8).hexdigest()
    return cache_folder("profiles") / f"{name}.json"
