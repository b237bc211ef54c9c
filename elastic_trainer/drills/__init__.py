"""Faults on a real cluster of this machine, and what must hold afterwards."""
