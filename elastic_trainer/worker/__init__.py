"""What runs inside a training process: the session, its steps, and everything that makes them survive."""
