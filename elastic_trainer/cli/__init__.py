"""The ``elastic-trainer`` command."""
