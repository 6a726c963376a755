"""Ways for KV blocks: TCP between hosts, shared memory within one."""
