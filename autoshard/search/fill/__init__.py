"""Fills the stages of outer points: layers and recompute of each, with bounds of all splits."""
