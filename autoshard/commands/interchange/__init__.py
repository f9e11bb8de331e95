"""The commands about configurations of other programs."""
