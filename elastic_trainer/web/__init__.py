"""Read-only HTTP: the server, access control, and a node's own metrics."""
