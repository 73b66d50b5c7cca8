"""Training: uneven batches and uneven shards, exactly as one device would have computed it."""
