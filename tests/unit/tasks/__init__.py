"""The ready-made tasks: data readers and the functions around the network."""
