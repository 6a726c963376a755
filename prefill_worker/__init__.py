"""The prefill worker: chunked prefill under a token budget. Blocks are sent while the next chunk computes."""
