"""What workers report: live, as history, by device, and for Prometheus."""
