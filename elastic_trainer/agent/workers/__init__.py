"""The worker processes of one node: led through rounds, watched, killed where they must be."""
