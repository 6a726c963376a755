"""Connections, bodies, keys, limits and TLS: what is the same whichever API a client speaks."""
