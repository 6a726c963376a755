"""Kernels that compute each row separately: norms, activations."""
