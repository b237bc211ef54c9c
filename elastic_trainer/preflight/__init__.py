"""Whether a machine is fit to train: checks of one node, their comparison with other nodes', and the verdict."""
