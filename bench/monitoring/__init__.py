"""Monitoring: what it costs, how soon it names a slow or missing rank, and whether it raises false alarms."""
