"""The command `mimatrix`."""
