"""What ``autoshard run`` does: it executes a plan, or compiles it ahead, and shows its steps."""
