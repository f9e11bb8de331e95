"""Checkpoints: the state of a run in files of any filesystem, for this plan and for any other of the model."""
