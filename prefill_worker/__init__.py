"""The prefill worker: chunked prefill under a token budget, blocks shipped while the next chunk computes."""
