"""Which samples each rank gets, in which order, and how they are loaded."""
