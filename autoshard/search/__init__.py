"""From a question to the best plan: the space, its prices, the answer, what would help."""
