"""Where commands write: what is tried before their work, and what is kept."""
