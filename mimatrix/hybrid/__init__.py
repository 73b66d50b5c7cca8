"""Groups of ranks that do not wait for each other: synchronous within a group, asynchronous between groups."""
