"""Attention over paged keys and values, and what writes them into the pool."""
