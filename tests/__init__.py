"""The tests: unit, contract, integration, drills and benchmarks."""
