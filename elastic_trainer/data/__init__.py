"""Which samples each rank trains on: the plan of an epoch, and drawing it from a data set."""
