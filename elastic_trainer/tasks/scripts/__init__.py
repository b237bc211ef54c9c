"""Scripts to start from: a session, and plain DDP before and after the four changes that make it elastic."""
