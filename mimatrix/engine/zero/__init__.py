"""ZeRO stages 0 to 3: what is sharded in each, and what moves when."""
