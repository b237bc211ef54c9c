"""Detects frozen nodes and hung workers by asking neighbouring agents, long before a lease ends."""
