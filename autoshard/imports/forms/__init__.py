"""The forms of files: text to keys and values, without running any of it."""
