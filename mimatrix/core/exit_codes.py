"""Exit codes that have a meaning between the processes of MiMatrix, and for scripts that call it."""

FAILED = 1
"""A failure that the input is not to blame for."""
BAD_INPUT = 2
"""A `UserError`: the same input fails again, so the job is not restarted."""
CANNOT_FORK = 71
"""No process could be had, for the moment (EX_OSERR)."""
PREEMPTED = 75
"""The rank saved a checkpoint and stopped because it was told to (EX_TEMPFAIL)."""
PEER_LOST = 76
"""The rank stopped because it lost another one; it is not the rank to blame."""
TIMED_OUT = 124
"""A time limit was reached, as with `timeout`."""
CANNOT_RUN = 126
"""The command could not be started, as in a shell."""
SIGNALED = 128
"""Plus the number of a signal: killed by it, as in a shell."""
