"""Checkpoints: what is saved, how it is written, and how any number of ranks loads it."""
