"""Recovery in place: from round to round in one process, led by the node's agent."""
