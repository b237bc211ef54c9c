"""The store, without a server."""
