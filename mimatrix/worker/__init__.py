"""What one process of a job runs."""
