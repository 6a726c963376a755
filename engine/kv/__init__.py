"""The paged KV cache: pool, block manager, prefix cache, and copies between device and host."""
