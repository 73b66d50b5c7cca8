"""Synchronisation between ranks inside of one collective."""
