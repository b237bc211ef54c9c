"""The monitor: all runs in the store, for people and for Prometheus."""
