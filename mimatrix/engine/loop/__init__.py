"""The training loop: global batch after global batch, on every rank."""
