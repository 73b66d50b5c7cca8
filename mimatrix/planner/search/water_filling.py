"""Who owns how much of the model: the shares with the shortest optimizer step that there is room for."""

import numpy as np

from mimatrix.planner.search.cost_tables import SLACK, Floats


def least_stepping(held: Floats, optimizer_s: Floats) -> Floats:
    """For each row of `held`, the shares that ranks have room for: the shortest time of the optimizer's step.

    A rank that takes `optimizer_s` for everything can step tau / optimizer_s of it in tau, and hold no more than it
    has room for; the shortest tau is the one for which that adds up to one. Infinite where there is no room.
    """
    # In the order in which ranks fill up: until then each adds 1 / optimizer_s for every second.
    full_at = held * optimizer_s
    order = np.argsort(full_at, axis=1)
    room = np.take_along_axis(held, order, axis=1)
    rate = 1.0 / optimizer_s[order]
    filled = np.cumsum(room, axis=1) - room
    rates = np.cumsum(rate[:, ::-1], axis=1)[:, ::-1]
    # If the first k ranks are full: the time at which the others have taken the rest. Right for the first k where
    # the next one is not full yet by then.
    taus = (1.0 - filled) / rates
    fits = taus <= np.take_along_axis(full_at, order, axis=1) + SLACK * taus
    first = np.argmax(fits, axis=1)
    found: Floats = np.take_along_axis(taus, first[:, None], axis=1)[:, 0]
    enough = held.sum(axis=1) >= 1.0 - SLACK
    # All full, and rounding hides it: the last to fill up says when.
    found = np.where(fits.any(axis=1), found, full_at.max(axis=1))
    return np.where(enough, np.maximum(found, 0.0), np.inf)


def share_out(held: Floats, optimizer_s: Floats) -> Floats:
    """The shares with the shortest optimizer step within `held`. There must be room."""
    tau = least_stepping(held[None], optimizer_s)[0]
    shares: Floats = np.minimum(held, tau / optimizer_s)
    # What rounding left: from or to all in proportion to what they have, which is next to nothing.
    scaled: Floats = shares / shares.sum()
    return scaled
