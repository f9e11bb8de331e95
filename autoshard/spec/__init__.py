"""What the user states: models, clusters, workloads, kernels, recipes; frozen, checked, with sources."""
