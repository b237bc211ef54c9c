"""Starts Python programs by forking a process that has imported what they will import."""
