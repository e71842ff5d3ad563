"""Timing and memory, measured so that they can be trusted."""
