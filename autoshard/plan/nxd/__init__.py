"""Which layers of neuronx-distributed (NxD) stand for a plan's table; no torch, no NxD."""
