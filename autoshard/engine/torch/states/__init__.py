"""What a rank keeps from step to step: its weights, the sums of their gradients, and the optimizer's state."""
