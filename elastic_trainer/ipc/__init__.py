"""What agent and workers of one node share: messages over a unix socket, a mutex that reports a death, pages, and the
address at which other nodes reach it."""
