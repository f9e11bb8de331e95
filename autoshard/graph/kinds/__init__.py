"""The kinds of operation: one class each; a new kind needs no other place."""
