"""Groups that do not wait for each other: synchronous inside of a group, asynchronous between groups."""
