"""torchrun's rendezvous handlers and their guards: joining, waiting, leaving."""
