"""What the agent and the workers of one node share: messages over a unix socket, a mutex that tells of a death."""
