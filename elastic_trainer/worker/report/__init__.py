"""A worker's reports: its heartbeat page, the ledger of its steps, its metrics endpoint."""
