"""The exact search for batches and shares: one module for each method."""
