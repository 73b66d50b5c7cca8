"""A group's side of hybrid training: pushes, pulls and checkpoints."""
