"""What is known of a run, as values that page, commands and metrics share."""
