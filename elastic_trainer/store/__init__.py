"""The coordination store: a small port over etcd v3.

``api`` is the port and names the keys; ``connect`` opens it; ``session`` holds a lease. Importing this package does not
import grpc.
"""

from elastic_trainer.store.connect import connect, connect_checked, connect_patiently

__all__ = ["connect", "connect_checked", "connect_patiently"]
