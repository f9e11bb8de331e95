"""Weights from one form to another: every form is files of tensors, and patches that say what they hold of ours."""
