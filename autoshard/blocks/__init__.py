"""The exact solver of one block: the cheapest layout of every operation, by elimination over tables of prices."""
