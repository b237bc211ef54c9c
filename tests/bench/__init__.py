"""Benchmarks: one module for each theme, each measuring its peer side by side (``python -m tests.bench``)."""
