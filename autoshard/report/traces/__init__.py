"""A step as a trace that viewers draw: as it is predicted, what is inside its passes, and what a run measured."""
