"""Which part of a tensor each rank holds, and what is sent where two operations disagree."""
