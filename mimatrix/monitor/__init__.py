"""Judge the metrics that ranks report: stragglers, hangs, and what is kept over time. Pure functions."""
