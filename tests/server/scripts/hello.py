import os
import sys
from pathlib import Path

print("rank", os.environ["RANK"], "of", os.environ["WORLD_SIZE"], *sys.argv[1:], flush=True)
assert not {"MIMATRIX_TOKEN", "MIMATRIX_TOKEN_FD"} & os.environ.keys()
assert b"MIMATRIX_TOKEN=" not in Path("/proc/self/environ").read_bytes()
