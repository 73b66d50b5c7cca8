"""The demo: one training, evenly and as planned, with a live display."""
