"""Starts Python programs by forking a process that has already imported their modules."""
