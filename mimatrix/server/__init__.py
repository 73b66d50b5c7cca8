"""The job server: receives jobs, gives each its devices, watches them. No tensor ever comes here."""

from mimatrix.server.main import Settings, serve

__all__ = ["Settings", "serve"]
