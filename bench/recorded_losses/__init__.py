"""Losses and parameters of small training runs, bit for bit, so that a change of the code can be compared with what it replaced."""
