"""The training package: pure parts and parts that need one process only."""
