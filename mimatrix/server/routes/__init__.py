"""The REST interface, under /api."""
