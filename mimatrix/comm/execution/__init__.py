"""Executors: a schedule's moves on tensors."""
