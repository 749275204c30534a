"""How we know: bits per byte and recall."""
