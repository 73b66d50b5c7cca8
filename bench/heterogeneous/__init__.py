"""MiMatrix next to other systems, on workers of unequal speed: `python -m bench.heterogeneous`."""
