"""Make docs/measurements/simulated.md and its pictures: `make study`."""

import time

from bench.markdown import machine, write_page
from bench.simulation_study import congestion, scaling, uneven
from bench.simulation_study.common import COSTS


def main() -> None:
    """Write all three parts, then the page."""
    started = time.perf_counter()
    parts = [part.section() for part in (scaling, congestion, uneven)]
    took = time.perf_counter() - started
    write_page(
        "simulated.md",
        f"""# What collectives cost on networks: a simulated study

Made by `make study` in {took:.0f} s ({machine()}). Every figure on this page is simulated, none is measured on a network:
flows share every link max-min fairly, a transfer's data arrive one path latency after they were sent, every
synchronisation costs {COSTS.sync_s * 1e6:.0f} µs, a rank keeps {COSTS.in_flight} reads in flight, adding is free. Next to each published figure
stands what this model gives, and why the two differ. Algorithms that are our reconstruction are named so.

{"".join(parts)}""",
    )


if __name__ == "__main__":
    main()
