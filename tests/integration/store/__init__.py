"""The store against real etcd servers that crash, freeze and forget."""
