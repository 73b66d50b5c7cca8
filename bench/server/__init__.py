"""The job server measured: load, and what crosses its sockets."""
