"""Which measured profile speaks for which device of a described cluster."""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from mimatrix.cluster import Cluster
from mimatrix.cluster.model import Device
from mimatrix.core.errors import UserError, nearest
from mimatrix.planner.model.profile import Communication, Measurements, Profile

_USABLE = 92
"""Per cent of a device's memory that a plan may fill: allocators and drivers want the rest."""
_UNNAMED = Device().kind


def joined(files: Sequence[tuple[str, Measurements]]) -> Measurements:
    """Several files of measurements as one; all must be of the same model. `files` are (name, measurements).

    What ranks of several files would pay together, nobody measured.
    """
    (first_name, first), *others = files
    if not others:
        return first
    for name, each in others:
        if each.model.fingerprint != first.model.fingerprint:
            raise UserError(
                f"{name} is a profile for another model ({each.model.name}) than {first_name} ({first.model.name}); "
                f"measure both with the same script: mimatrix profile script.py"
            )
    profiles = tuple(profile for _, each in files for profile in each.profiles)
    apart = Communication((0.0,) * 4, reason=f"not measured: {len(files)} files, each on its own")
    return Measurements(first.model, profiles, apart, any(each.equal_counts for _, each in files))


def devices_of(cluster: Cluster) -> tuple[Device, ...]:
    """In the order of `device_names`."""
    return tuple(device for node in cluster.nodes for device in node.devices)


def names_of(cluster: Cluster) -> tuple[str, ...]:
    """What people call each device: where it is, and its kind."""
    return tuple(
        name if device.kind == _UNNAMED else f"{name} {device.kind}"
        for name, device in zip(cluster.device_names, devices_of(cluster), strict=True)
    )


def profiles_for(devices: Sequence[Device], measured: Sequence[Profile]) -> tuple[Profile, ...]:
    """A profile for each device, by its kind. Memory that the description gives replaces what was measured.

    Where several ranks of a kind were measured, the first device of the kind is like the first of them, and so on.
    """
    by_name: dict[str, list[Profile]] = {}
    for profile in measured:
        by_name.setdefault(profile.device, []).append(profile)
    names = {kind: kind_of(kind, tuple(by_name)) for kind in dict.fromkeys(device.kind for device in devices)}
    seen: Counter[str] = Counter()
    found = []
    for device in devices:
        alike = by_name[names[device.kind]]
        found.append(_with_memory(alike[seen[device.kind] % len(alike)], device.memory_bytes))
        seen[device.kind] += 1
    return tuple(found)


def memory_with(room_bytes: int) -> int:
    """The memory of a device that a plan may fill up to `room_bytes`, as `profiles_for` reads it."""
    return -(-room_bytes * 100 // _USABLE)


def kind_of(kind: str, measured: Sequence[str]) -> str:
    """The measured device that a cluster's `kind` means: `3090` is the `NVIDIA GeForce RTX 3090`."""
    if kind == _UNNAMED and len(measured) == 1:
        return measured[0]
    found = meant(kind, measured)
    if len(found) == 1:
        return found[0]
    if found:
        both = " or ".join(f'"{name}"' for name in found)
        raise UserError(f'the device "{kind}" could be {both}; write which of them the cluster has')
    # People leave out the maker's name, so the ends of names are compared, too.
    close = nearest(kind, {end for name in measured for end in _ends(name)})
    fix = close if "did you mean" in close else "; name one of these, or measure it: mimatrix profile script.py"
    raise UserError(f'the device "{kind}" was not measured (measured: {", ".join(sorted(measured))}){fix}')


def meant(kind: str, known: Sequence[str]) -> list[str]:
    """Those of the `known` kinds that a person may mean by `kind`: by its whole name, by words of it, by a part."""
    return _same(kind, known) or _whole_words(kind, known) or _parts(kind, known)


def _same(kind: str, measured: Sequence[str]) -> list[str]:
    return [name for name in measured if name.lower() == kind.lower()]


def _whole_words(kind: str, measured: Sequence[str]) -> list[str]:
    """`A40` means the A40 and not the A4000 beside it; whoever writes more than was measured means it, too."""
    return [name for name in measured if _has_words(name, kind)] or [
        name for name in measured if _has_words(kind, name)
    ]


def _parts(kind: str, measured: Sequence[str]) -> list[str]:
    return [name for name in measured if kind and kind.lower() in name.lower()]


def _ends(name: str) -> list[str]:
    """`RTX 3090` and `3090` of `NVIDIA RTX 3090`."""
    words = name.split()
    return [" ".join(words[start:]) for start in range(len(words))]


def _has_words(text: str, words: str) -> bool:
    return bool(words and re.search(rf"(?<![^\W_]){re.escape(words)}(?![^\W_])", text, re.IGNORECASE))


def _with_memory(profile: Profile, memory_bytes: int) -> Profile:
    return replace(profile, room_bytes=memory_bytes * _USABLE // 100) if memory_bytes else profile
