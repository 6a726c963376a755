"""Processes that compute each step together, each its part of the model: the leader's, and its ranks'."""
