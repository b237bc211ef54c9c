"""Rules and values, without I/O beyond temporary files."""
