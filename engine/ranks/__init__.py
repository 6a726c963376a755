"""Several processes that compute each step together, each with its part of the model: the leader and its ranks."""
