"""Blocks between a GPU's pool and the host: copies, the memory that they pass, and digests made on the device."""
