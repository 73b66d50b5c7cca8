"""The devices that a job asks for, as people write them: `4`, `a100:2,v100:4`, `2..8`, `all`."""

import re
from dataclasses import dataclass

from mimatrix.core.errors import UserError

ANY = ""
"""Any kind."""
_MOST = 65_536
_ITEM = re.compile(r"(?:(?P<kind>[^:]*[^:\s])\s*:)?\s*(?P<least>\d+)(?:\s*\.\.\s*(?P<most>\d+))?")


@dataclass(frozen=True, slots=True)
class DeviceRequest:
    """Devices of one kind: `least` must be there, `most` are of use."""

    kind: str
    least: int
    most: int

    def __str__(self) -> str:
        count = str(self.least) if self.least == self.most else f"{self.least}..{self.most}"
        return f"{self.kind}:{count}" if self.kind else count


@dataclass(frozen=True, slots=True)
class ResourceRequest:
    """All that a job asks for; without parts, every device of the cluster."""

    parts: tuple[DeviceRequest, ...] = ()

    @classmethod
    def parse(cls, text: str) -> "ResourceRequest":
        """Parse what a person wrote.

        Raises:
            UserError: It is not a request for devices.
        """
        if text.strip().lower() == "all":
            return cls()
        return cls(tuple(_part(item, text) for item in text.split(",")))

    @property
    def is_all(self) -> bool:
        """Whether it asks for every device."""
        return not self.parts

    @property
    def least(self) -> int:
        """Return the number of devices without which it cannot start."""
        return sum(part.least for part in self.parts)

    def within(self, devices: int) -> "ResourceRequest":
        """Return this request with a count in place of `all`."""
        return ResourceRequest((DeviceRequest(ANY, devices, devices),)) if self.is_all else self

    def __str__(self) -> str:
        return ",".join(map(str, self.parts)) or "all"


def _part(item: str, text: str) -> DeviceRequest:
    found = _ITEM.fullmatch(item.strip())
    least = int(found["least"]) if found else 0
    most = int(found["most"] or least) if found else 0
    if not found or not 1 <= least <= most <= _MOST:
        raise UserError(
            f'"{text}" names no devices; write a number, kinds with numbers, a range or all: 4, a100:2,v100:4, 2..8'
        )
    return DeviceRequest(found["kind"] or ANY, least, most)
