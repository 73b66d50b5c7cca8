"""The result of a replay: when every rank did what, and how much each channel carried."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mimatrix.core.units import format_rate
from mimatrix.netsim.traffic import Traffic

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RoundSpan:
    """One rank in one round: it reads from `began_s` until its last data arrived at `ended_s`, and waits before."""

    rank: int
    round: int
    waited_from_s: float
    began_s: float
    ended_s: float


@dataclass(frozen=True)
class Timeline:
    """The result of a replay. Times in seconds from the start; channels in the order of `traffic.fabric.channels`."""

    traffic: Traffic
    message_bytes: float
    seconds: float
    began_s: Floats
    """[rank, round]: when the rank's reads of the round started."""
    ended_s: Floats
    """[rank, round]: when the last data of the round had arrived."""
    move_began_s: Floats
    move_ended_s: Floats
    channel_bytes: Floats
    channel_busy_s: Floats
    """How long each channel carried anything."""
    adding_s: float = 0.0
    """How long the rank that adds most would need for that alone."""

    def spans(self, rank: int) -> list[RoundSpan]:
        """Return the rounds of one rank, without those in which it had nothing to read."""
        ends = np.concatenate(([0.0], self.ended_s[rank, :-1]))
        return [
            RoundSpan(rank, number, float(ends[number]), float(began), float(ended))
            for number, (began, ended) in enumerate(zip(self.began_s[rank], self.ended_s[rank], strict=True))
            if ended > began
        ]

    @property
    def bottleneck(self) -> int:
        """The channel that would need longest for what it carried if nothing else delayed it."""
        return int(np.argmax(self.channel_bytes / self.traffic.fabric.rates))

    @property
    def bottleneck_name(self) -> str:
        """The name of the bottleneck channel, as in `n3->leaf0`."""
        return self.traffic.fabric.channels[self.bottleneck].name

    @property
    def bottleneck_use(self) -> float:
        """The fraction of the bottleneck's capacity used over the whole time; if low, latency dominates."""
        need = self.channel_bytes[self.bottleneck] / self.traffic.fabric.rates[self.bottleneck]
        return float(need / self.seconds) if self.seconds else 0.0

    def blame(self) -> str:
        """Return a sentence on what the time goes into."""
        channel = self.traffic.fabric.channels[self.bottleneck]
        use = self.bottleneck_use
        link = f"{channel.name} ({format_rate(channel.rate_bytes_per_s)})"
        if self.seconds and self.adding_s / self.seconds > use:
            return f"adding takes {self.adding_s / self.seconds:.0%} of the time, the busiest link {link} {use:.0%}"
        if use >= 0.9:
            return f"{link} is full {use:.0%} of the time"
        return f"no link is full throughout, even {link} only {use:.0%} of the time: waiting, shared links, latency"
