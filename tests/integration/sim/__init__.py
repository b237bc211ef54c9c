"""The local cluster and its parts, for real."""
