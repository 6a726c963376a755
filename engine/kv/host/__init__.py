"""The tier of KV blocks in the host's memory, below a GPU's pool."""
