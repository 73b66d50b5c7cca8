"""Water filling: the shares of the model with the shortest optimizer step that there is room for."""

import numpy as np

from mimatrix.planner.search.cost_tables import Floats
from mimatrix.planner.search.limits import SHARE_SLACK


def min_stepping_s(capacity: Floats, optimizer_s: Floats) -> Floats:
    """Return the shortest time of the optimizer's step for each row of `capacity`, the shares that ranks have room for.

    A rank that takes `optimizer_s` for everything can step tau / optimizer_s of it in tau, and hold no more than it
    has room for; the shortest tau is the one for which that adds up to one. Infinite if there is no room.
    """
    # In the order in which ranks fill up: until then each adds 1 / optimizer_s for every second.
    full_at = capacity * optimizer_s
    order = np.argsort(full_at, axis=1)
    room = np.take_along_axis(capacity, order, axis=1)
    rate = 1.0 / optimizer_s[order]
    filled = np.cumsum(room, axis=1) - room
    rates = np.cumsum(rate[:, ::-1], axis=1)[:, ::-1]
    # If the first k ranks are full: the time at which the others have taken the rest. Right for the first k where
    # the next one is not full yet by then.
    taus = (1.0 - filled) / rates
    fits = taus <= np.take_along_axis(full_at, order, axis=1) + SHARE_SLACK * taus
    first = np.argmax(fits, axis=1)
    shortest: Floats = np.take_along_axis(taus, first[:, None], axis=1)[:, 0]
    enough = capacity.sum(axis=1) >= 1.0 - SHARE_SLACK
    # All full, and rounding hides it: the last to fill up says when.
    shortest = np.where(fits.any(axis=1), shortest, full_at.max(axis=1))
    return np.where(enough, np.maximum(shortest, 0.0), np.inf)


def fill_shares(capacity: Floats, optimizer_s: Floats) -> Floats:
    """Return the shares with the shortest optimizer step within `capacity`. There must be room."""
    tau = min_stepping_s(capacity[None], optimizer_s)[0]
    shares: Floats = np.minimum(capacity, tau / optimizer_s)
    # What rounding left is taken from all, or given to all, in proportion to what they have.
    scaled: Floats = shares / shares.sum()
    return scaled
