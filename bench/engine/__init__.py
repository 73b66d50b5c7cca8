"""Measurements of the engine; `python -m bench.engine` writes docs/measurements/engine.md."""
