"""Logs of training runs of other programs, read into measured rows."""
