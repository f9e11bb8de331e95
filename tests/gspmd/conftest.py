"""What pytest must not import: a script for an environment with torch-xla."""

collect_ignore = ["on_xla.py"]
