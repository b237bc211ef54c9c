"""Faults made on purpose: killed, frozen, partitioned, full, damaged."""
