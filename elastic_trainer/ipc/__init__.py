"""Communication of agent and workers on one node: messages over a unix socket, a mutex that reports a death, pages."""
