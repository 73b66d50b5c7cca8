"""Choose the measured profile that stands for each device of a described cluster."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from mimatrix.cluster import Cluster
from mimatrix.cluster.model import Device
from mimatrix.core.device_kinds import match_kind
from mimatrix.core.errors import UserError, close_match
from mimatrix.planner.model.profile import Communication, Measurements, Profile

_USABLE_PERCENT = 92
"""Of a device's memory, what a plan may fill: allocators and drivers need the rest."""
_UNNAMED = Device().kind


def join_measurements(files: Sequence[tuple[str, Measurements]]) -> Measurements:
    """Return several files of measurements as one. What ranks of different files would pay together is unknown.

    Args:
        files: The name and the measurements of each file.

    Raises:
        UserError: Two files are of different models.
    """
    (first_name, first), *others = files
    if not others:
        return first
    for name, other in others:
        if other.model.fingerprint != first.model.fingerprint:
            raise UserError(
                f"{name} is a profile for another model ({other.model.name}) than {first_name} ({first.model.name}); "
                f"measure both with the same script: mimatrix profile script.py"
            )
    profiles = tuple(profile for _, measured in files for profile in measured.profiles)
    unknown = Communication((0.0,) * 4, reason=f"not measured: {len(files)} files, each on its own")
    return Measurements(first.model, profiles, unknown, any(measured.equal_counts for _, measured in files))


def list_devices(cluster: Cluster) -> tuple[Device, ...]:
    """Return the devices of a cluster in the order of `device_names`."""
    return tuple(device for node in cluster.nodes for device in node.devices)


def label_devices(cluster: Cluster) -> tuple[str, ...]:
    """Return for each device its place in the cluster and its kind, as in `pair/0 3090`."""
    return tuple(
        name if device.kind == _UNNAMED else f"{name} {device.kind}"
        for name, device in zip(cluster.device_names, list_devices(cluster), strict=True)
    )


def assign_profiles(devices: Sequence[Device], measured: Sequence[Profile]) -> tuple[Profile, ...]:
    """Return a profile for each device, by its kind; memory that the description gives replaces the measured one.

    If several ranks of a kind were measured, devices of the kind take their profiles in turn.
    """
    by_name: dict[str, list[Profile]] = {}
    for profile in measured:
        by_name.setdefault(profile.device, []).append(profile)
    names = {kind: find_measured(kind, tuple(by_name)) for kind in dict.fromkeys(device.kind for device in devices)}
    seen: Counter[str] = Counter()
    assigned = []
    for device in devices:
        candidates = by_name[names[device.kind]]
        assigned.append(_with_memory(candidates[seen[device.kind] % len(candidates)], device.memory_bytes))
        seen[device.kind] += 1
    return tuple(assigned)


def memory_for_room(room_bytes: int) -> int:
    """Return the memory of a device that a plan may fill up to `room_bytes`; `assign_profiles` is its inverse."""
    return -(-room_bytes * 100 // _USABLE_PERCENT)


def find_measured(kind: str, measured: Sequence[str]) -> str:
    """Return the measured device that a cluster's `kind` means: `3090` is the `NVIDIA GeForce RTX 3090`.

    Raises:
        UserError: None of the measured devices matches, or several do.
    """
    if kind == _UNNAMED and len(measured) == 1:
        return measured[0]
    matches = match_kind(kind, measured)
    if len(matches) == 1:
        return matches[0]
    if matches:
        both = " or ".join(f'"{name}"' for name in matches)
        raise UserError(f'the device "{kind}" could be {both}; write which of them the cluster has')
    # People leave out the maker's name, so the ends of names are compared, too.
    close = close_match(kind, {end for name in measured for end in _ends(name)})
    fix = f'did you mean "{close}"?' if close else "name one of these, or measure it: mimatrix profile script.py"
    raise UserError(f'the device "{kind}" was not measured (measured: {", ".join(sorted(measured))}); {fix}')


def _ends(name: str) -> list[str]:
    """Return `NVIDIA RTX 3090`, `RTX 3090` and `3090` of the first."""
    words = name.split()
    return [" ".join(words[start:]) for start in range(len(words))]


def _with_memory(profile: Profile, memory_bytes: int) -> Profile:
    return replace(profile, room_bytes=memory_bytes * _USABLE_PERCENT // 100) if memory_bytes else profile
