"""What pytest must not import: a script for an environment with torch-xla and NxD."""

collect_ignore = ["on_xla.py"]
