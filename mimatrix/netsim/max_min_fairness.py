"""Max-min fair rates of flows over channels: no flow can get more unless one with no more than that gets less."""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

_SAME = 1e-12
"""Two shares closer than this, relatively, are one: rounding must not tell alike flows apart."""


def fair_rates(paths: Ints, capacities: Floats) -> Floats:
    """Return the rate of each flow. `paths` has a row of channel numbers per flow, padded with an infinite channel.

    Progressive filling, many bottlenecks at a time: a channel whose equal share is the smallest that any of its flows
    meets anywhere is full at that share, whatever happens elsewhere, so all such channels are settled in one sweep.
    """
    rates = np.zeros(len(paths))
    left = capacities.copy()
    live, crossed = np.arange(len(paths)), paths
    count = np.bincount(crossed.ravel(), minlength=len(left))
    while len(live):
        share = np.divide(left, count, out=np.full(len(left), np.inf), where=count > 0)
        tightest = share[crossed].min(axis=1)
        met = np.repeat(tightest, paths.shape[1])
        least_met = np.full(len(left), np.inf)
        np.minimum.at(least_met, crossed.ravel(), met)
        full = least_met >= share * (1 - _SAME)
        settled = full[crossed].any(axis=1)
        rates[live[settled]] = tightest[settled]
        gone = crossed[settled].ravel()
        used = np.where(np.isfinite(tightest[settled]), tightest[settled], 0.0)
        left -= np.bincount(gone, weights=np.repeat(used, paths.shape[1]), minlength=len(left))
        np.maximum(left, 0.0, out=left)
        count -= np.bincount(gone, minlength=len(left))
        live, crossed = live[~settled], crossed[~settled]
    return rates
