"""HTTP for every API: connections, bodies, keys, limits and TLS."""
