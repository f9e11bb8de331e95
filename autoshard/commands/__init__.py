"""The commands, one module each; the docstring of a command is its help."""
