"""All-reduce on real links: docs/measurements/allreduce.md, one module for each part."""
