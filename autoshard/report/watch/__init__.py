"""A run seen from outside: what its folder holds, what follows from that at a moment, and how it is shown."""
