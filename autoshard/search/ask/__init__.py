"""Front doors of the search: a question, its answers, and what to ask where there is none."""
