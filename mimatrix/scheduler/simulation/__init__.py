"""Recorded or invented traces of jobs, replayed through the scheduler."""
