"""Finds nodes and workers that stand still by asking the agents around, long before a lease ends."""
