"""Says what runs, how fast it could be, and what limits it."""
