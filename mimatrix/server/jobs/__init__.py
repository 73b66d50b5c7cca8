"""The life of a job, and the archives of its code."""
