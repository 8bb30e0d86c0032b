"""Who starts the processes that train, and what becomes of them."""
