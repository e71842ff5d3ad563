"""Linear attention with decay."""
