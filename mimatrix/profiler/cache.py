"""Profiles that were measured before, as files: the same model on the same device is not measured twice."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch

from mimatrix import __version__
from mimatrix.comm.tuning.tuner import cache_folder
from mimatrix.core import environment
from mimatrix.core.errors import MiMatrixError
from mimatrix.core.files import write_atomic
from mimatrix.planner.profile import VERSION, Profile
from mimatrix.profiler.device import Limits, measure_device, room_for
from mimatrix.profiler.fingerprints import device_fingerprint
from mimatrix.profiler.trial import ProfileTarget

_NOISY = 0.25
"""Where times differ so much, something else was going on: good enough for now, not for another time."""


def cached_measure(subject: ProfileTarget, limits: Limits, say: Callable[[float], None] = lambda _: None) -> Profile:
    """What was measured before under the same circumstances, in no time; otherwise measured now and kept.

    `MIMATRIX_FRESH` in the environment: measured now in any case.
    """
    room_bytes = room_for(subject, limits)
    file = _file(subject, limits.most, room_bytes)
    if (found := recalled(file)) and not environment.FRESH.get():
        say(1.0)
        return replace(found, room_bytes=room_bytes, took_s=0.0)
    profile = measure_device(subject, replace(limits, room_bytes=room_bytes), say)
    if profile.noise <= _NOISY:
        keep(file, profile)
    return profile


def recalled(file: Path) -> Profile | None:
    """The profile of a file; None where there is none that can be believed."""
    try:
        return Profile.from_json(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, MiMatrixError):
        return None


def keep(file: Path, profile: Profile) -> None:
    """Write a profile, all of it or nothing. One that cannot be written is measured anew next time."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(file, json.dumps(profile.to_json(), indent=1))
    except OSError:
        return


def _file(subject: ProfileTarget, most: int, room_bytes: int) -> Path:
    device = device_fingerprint(subject.device, room_bytes)
    versions = [torch.__version__, __version__, VERSION]
    facts = [subject.fingerprint, device, most, subject.precision, subject.unit_bytes, subject.circumstances, versions]
    name = hashlib.blake2b(json.dumps(facts).encode(), digest_size=8).hexdigest()
    return cache_folder().parent / "profiles" / f"{name}.json"
