"""The rendered manifests really run: pods come, are scaled, evicted and killed, and the Job completes or fails."""
