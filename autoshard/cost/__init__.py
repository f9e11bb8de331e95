"""Seconds and bytes of a plan, read off the sharded graph."""
