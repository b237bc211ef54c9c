"""A cluster on one machine: real etcd, real torchrun, network namespaces."""
