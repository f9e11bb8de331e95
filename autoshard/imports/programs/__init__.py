"""One module per program: its table of keys, and what it can express."""
