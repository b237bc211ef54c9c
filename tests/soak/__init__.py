"""Longer tests of in-place recovery, run by `make soak`: not yet part of the checks of every change."""
