"""The worker processes of one node: leads them through rounds, watches them, kills those that hang."""
