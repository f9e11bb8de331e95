"""Where the parts of a stack of layers begin and end, and what goes from part to part."""
