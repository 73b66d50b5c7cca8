"""MiMatrix beside what people use instead, on workers of unlike speed: `python -m bench.heterogeneous`."""
