"""The job server: receives jobs, allocates devices to them, watches them. Tensors never come here."""

from mimatrix.server.main import serve
from mimatrix.server.settings import Settings

__all__ = ["Settings", "serve"]
