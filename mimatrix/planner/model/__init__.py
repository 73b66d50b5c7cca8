"""What is measured, what is to be decided, and what was decided: profiles, curves, problems, splits, plans."""
