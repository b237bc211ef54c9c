"""Jobs played in numbers: what Prometheus would have scraped of them, as tests of the alerting rules."""
