"""Benchmarks of the job server: its load, and the bytes on its sockets."""
