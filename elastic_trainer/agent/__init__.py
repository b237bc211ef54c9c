"""The node agent: threads inside the torchrun process, loaded as torchrun's rendezvous plugin ``etcd3``."""
