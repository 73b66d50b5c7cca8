"""Commands about jobs of a server."""
