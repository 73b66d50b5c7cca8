"""Modules of the user's model that training changes: batch norm and precision."""
