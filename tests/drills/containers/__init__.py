"""The image and the nodes in it, below a real Docker engine: ``make container-test``."""
