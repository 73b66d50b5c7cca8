"""Control connections: who is there, who is late, and who is to blame."""
