"""Which tokens a run eats: sources of samples, their files, and how both are made and checked."""
