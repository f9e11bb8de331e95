"""What may run: legality and capability Rules, each with its reason and its source."""
