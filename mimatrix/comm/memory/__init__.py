"""Memory of a rank that peers read without its help: arenas, and the kinds of windows under them."""
