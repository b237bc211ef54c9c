"""The state of a run, as values that page, commands and metrics share."""
