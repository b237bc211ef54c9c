"""Structured logs and metric families."""
