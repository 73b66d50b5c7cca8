"""Processes of this machine: groups that end together, signals, control groups, ports. Launchers and the lab use it."""
