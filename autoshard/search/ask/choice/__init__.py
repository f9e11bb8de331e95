"""Which of the plans that a search has found is written, and which others are shown beside it."""
