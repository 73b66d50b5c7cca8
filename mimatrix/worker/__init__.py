"""One process on one device."""
