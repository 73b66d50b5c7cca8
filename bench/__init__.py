"""Measurements, each made by one command. Speed lives here and never in a test's assertion."""
