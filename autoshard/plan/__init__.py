"""The plan: candidates in text, what may run, the plan file and its verification."""
