"""The decode worker: verifies handed-over KV, generates by inflight batching, prefills short prompts itself."""
