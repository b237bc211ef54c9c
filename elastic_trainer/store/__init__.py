"""The coordination store: a small port over etcd v3, with an in-memory twin for tests."""
