"""Commands about networks: simulated, emulated and measured."""
