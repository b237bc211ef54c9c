"""What the store knows of all runs, for people and for Prometheus."""
