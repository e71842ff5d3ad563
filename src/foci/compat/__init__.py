"""Peers' public signatures over our operators."""
