"""The monitor's HTTP answers: page, streams, metrics, targets."""
