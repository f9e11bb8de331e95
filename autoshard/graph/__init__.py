"""One training step as operations on tensors with named dims, before anything is sharded."""
