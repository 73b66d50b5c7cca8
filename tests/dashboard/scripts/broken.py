"""Two ranks with bars and colours, as terminals want them; the second one gives up."""

import os
import sys
import time

rank = os.environ["MIMATRIX_RANK"]
for part in range(0, 101, 20):
    sys.stdout.write(f"\rrank {rank} \x1b[32m{part:3}%\x1b[0m")
    sys.stdout.flush()
    time.sleep(0.01)
print(f"\nrank {rank} is ready", flush=True)
if rank == "1":
    time.sleep(0.5)
    sys.exit("nothing to see here")
time.sleep(600)
