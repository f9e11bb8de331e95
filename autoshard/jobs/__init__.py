"""From a plan to the files that start it on a cluster: text, made without torch, the same for the same plan."""
