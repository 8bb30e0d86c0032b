"""Orchestration: conf/ says which work, stages/ does it, this package orders it, runs it and remembers it."""
