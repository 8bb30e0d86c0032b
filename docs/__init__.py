"""Documentation, and the generator of its reference page."""
