"""Modules that others wrote, on four processes and on one: ``python -m benchmarks foreign_modules``."""
