"""Real Prometheus and Alertmanager beside a job."""
