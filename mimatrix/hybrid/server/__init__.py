"""Parameter shards and the processes that serve them."""
