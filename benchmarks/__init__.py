"""Paired benchmarks that answer, on this machine, what Ray costs and what the promised limits are: `python -m benchmarks`."""
