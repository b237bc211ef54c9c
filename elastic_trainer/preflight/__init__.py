"""Is this machine fit to train? Checks of one node, their comparison with other nodes', and the verdict."""
