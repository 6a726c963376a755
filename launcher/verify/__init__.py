"""``kvrelay verify``: greedy tokens beside those of transformers."""
