"""Says more than anybody reads, and then a word now and then."""

import time

for number in range(40_000):
    print(f"line {number} " + "·" * 80)
for number in range(10_000):
    print("tick", number, flush=True)
    time.sleep(0.5)
