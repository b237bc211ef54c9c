"""Commands on real processes."""
