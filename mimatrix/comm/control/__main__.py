"""`python -m mimatrix.comm.control DESCRIPTOR`: the coordinator of a job, as `coordinator_process` starts it."""

import sys

from mimatrix.comm.control.coordinator_process import main

if __name__ == "__main__":
    main(sys.argv[1:])
