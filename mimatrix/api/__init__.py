"""The REST interface of the job server as both ends see it: messages, and a client. Imports `core` only."""
