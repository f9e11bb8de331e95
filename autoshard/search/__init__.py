"""The search for the best plan: the space of candidates, their prices, the answer, and changes that would help."""
