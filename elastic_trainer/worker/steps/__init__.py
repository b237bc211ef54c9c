"""The steps of a training on one rank: drawing batches, one step, its commit, what ranks agree on between steps."""
