"""Control connections: which ranks are connected, which are late, and which one blocks the others."""
