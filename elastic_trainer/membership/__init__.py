"""Which nodes are in the run: pure rules, and the member that applies them to the store."""
