"""The coordination store: a small port over etcd v3.

``api`` is the port; ``connect`` opens it; ``session`` holds a lease; ``keys`` names the keys. Importing this package
does not import grpc.
"""

from elastic_trainer.store.connect import connect, connect_checked, connect_patiently

__all__ = ["connect", "connect_checked", "connect_patiently"]
