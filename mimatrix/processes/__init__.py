"""What the launcher and the lab need of the kernel: processes, process groups, control groups, signals."""
