"""The lifecycle of jobs: submission, states, events, and archives of their code."""
