"""What to do about it: who gets how much of the work."""

from mimatrix.planner.model.split import Batch, Split, resolve_batches

__all__ = ["Batch", "Split", "resolve_batches"]
