"""Branch and bound over outer points: the legal space, its prices, lower bounds, and the pool of points."""
