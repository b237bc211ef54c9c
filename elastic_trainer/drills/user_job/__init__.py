"""``elastic-trainer local``: the user's own job on a local cluster, with faults and a summary."""
