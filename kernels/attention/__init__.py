"""Attention over paged keys and values, and the kernels that write them into the pool."""
