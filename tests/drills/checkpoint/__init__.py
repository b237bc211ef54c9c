"""Checkpoints under faults: SIGKILL, full and read-only disks, flipped bits, readers beside writers."""
