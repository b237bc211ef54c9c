"""Reads all runs from the store."""
