"""Key points of all objects in an image."""
