"""Command lines and files of options become the arguments of a function."""
