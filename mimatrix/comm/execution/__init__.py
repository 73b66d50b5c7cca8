"""Executors: they run the moves of a schedule on tensors."""
