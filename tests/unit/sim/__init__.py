"""The rules of the local cluster: ledger, faults, picture, summary, view."""
