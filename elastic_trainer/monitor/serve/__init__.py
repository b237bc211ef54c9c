"""Answers of the monitor over HTTP: page, streams, metrics, targets."""
