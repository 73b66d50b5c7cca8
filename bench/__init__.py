"""Benchmarks, each made by one command. Speed is measured here and never asserted by a test."""

import sys
from pathlib import Path

# Measurements share `support` with the tests: a browser, a database, processes of workers, tasks. Tests never import measurements.
TESTS = str(Path(__file__).parent.parent / "tests")
if TESTS not in sys.path:
    sys.path.append(TESTS)
