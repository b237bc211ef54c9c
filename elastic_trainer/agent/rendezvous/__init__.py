"""torchrun's rendezvous handlers and what guards them: joining, waiting, leaving."""
