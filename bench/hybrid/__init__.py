"""What groups that do not wait cost in accuracy, and what they gain in time."""
