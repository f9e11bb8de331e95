"""Plans as configurations of other programs, with what these cannot express, by the tables of ``imports``."""
