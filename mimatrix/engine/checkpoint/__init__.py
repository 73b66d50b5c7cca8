"""Checkpoints: what is saved, how it is written, and how it is loaded on other ranks."""
