"""Softmax attention: one operator, one folder."""
