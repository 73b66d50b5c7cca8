"""The controller: sees what the launcher knows, decides and acts, job by job."""
