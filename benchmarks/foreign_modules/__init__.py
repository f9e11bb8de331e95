"""Modules that others wrote, sharded on four processes and compared with one: ``python -m benchmarks foreign_modules``."""
