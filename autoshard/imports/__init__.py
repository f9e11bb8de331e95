"""Configurations of other programs, as questions of autoshard: one table per program, which exports use as well."""
