"""What a worker reports: its heartbeat page, the journal of its steps, its metrics endpoint."""
