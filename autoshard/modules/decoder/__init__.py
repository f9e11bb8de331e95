"""A decoder's code as the blocks that the planner searches: embedding, equal layers, head."""
