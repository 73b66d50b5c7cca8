"""Commands that train, measure and plan on this machine."""
