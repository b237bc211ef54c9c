"""Frameworks that train in place: each believes that it is alone, and a session owns ranks, data and checkpoints.

A program under an integration trains as it would alone in one process: its batch is cut over the ranks, whatever their
number. Each module imports its framework, and nothing else does.
"""
