"""What is kept of a run step by step: a file always, trackers when asked. All of it lives where steps are shown."""
