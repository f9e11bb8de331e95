"""Training runs of decoders that have no card: their own code as the blocks that a plan's engine executes."""
