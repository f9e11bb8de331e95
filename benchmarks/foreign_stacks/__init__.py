"""Modules of other packages as stacks of layers: planned for clusters, and trained in pipelines that are killed."""
