"""Plans for people and programs: tables, JSON. Reads plans only."""
