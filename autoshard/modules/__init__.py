"""From a plain torch module to the graph: its program, names for its dims, operations of the graph's kinds."""
