"""What users had recently: device-seconds weighted by speed, half of which are forgotten every day."""

from collections.abc import Iterable, Mapping

from mimatrix.scheduler.state import Running

HALF_LIFE_S = 86_400.0
_NOTHING = 1e-9


def decay_and_add(used: Mapping[str, float], running: Iterable[Running], seconds: float) -> dict[str, float]:
    """Return the usage of each user after some more seconds of these jobs."""
    seconds = max(0.0, seconds)  # clocks are set back
    kept = 0.5 ** (seconds / HALF_LIFE_S)
    found = {user: kept * amount for user, amount in used.items() if kept * amount > _NOTHING}
    for each in running:
        found[each.user] = found.get(each.user, 0.0) + seconds * sum(device.speed for device in each.devices)
    return found
