"""What the agent and the workers of one node share: messages over a unix socket, and a mutex that reports a death."""
