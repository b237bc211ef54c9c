"""A cluster on one machine: real etcd, real torchrun, hosts of their own."""
