"""Which algorithm and transport carry a collective of a given size."""
