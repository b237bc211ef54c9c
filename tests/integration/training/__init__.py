"""Whole jobs as users start them: python -m, torchrun."""
