"""The loop that compares what is with what should be, and acts."""
