"""What is written into the graph of an exported module in the place of operations that no rule reads."""
