"""The health of one node: heartbeat pages, hung and slow ranks, time accounting, incidents."""
