"""One rank that measures its links over Gloo: torchrun's variables, HOSTS with commas; one line of JSON."""

import json
import os
import sys
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from mimatrix.profiler import measure_links

LATE = "LATE"
"""Names the rank that does not come."""


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    hosts = os.environ["HOSTS"].split(",")
    group = dist.group.WORLD
    assert group
    deadline = 60.0
    if LATE in os.environ:
        deadline = 3.0
        if dist.get_rank() == int(os.environ[LATE]):
            sys.stdin.read()  # until the test has seen enough
            return
    links = measure_links(group, hosts, deadline_s=deadline)
    found = json.dumps({"rank": dist.get_rank(), "latency": links.latency_s, "rate": links.rate_bytes_per_s}) + "\n"
    if folder := os.environ.get("ANSWERS"):
        (Path(folder) / f"{dist.get_rank()}.json").write_text(found)
    sys.stdout.write(found)
    sys.stdout.flush()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
