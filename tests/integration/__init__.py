"""Real processes: etcd, torchrun, gloo."""
