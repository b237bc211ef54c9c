"""Answers over HTTP, read-only: the server, who may read, and a node's own metrics."""
