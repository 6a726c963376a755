"""Transports of KV blocks: TCP between hosts, shared memory within one host."""
