"""Asynchronous groups: what they cost in accuracy, and what they gain in time."""
