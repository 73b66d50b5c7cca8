import sys
import time
from pathlib import Path

deadline = time.monotonic() + float(sys.argv[1])
count = 0
while time.monotonic() < deadline:
    count += 1
    print("tick", count, flush=True)
    time.sleep(0.1)
Path("done").write_text("yes")
