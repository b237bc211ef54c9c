"""How runs and nodes end in place, and what does not end them: real torchrun, real etcd."""
