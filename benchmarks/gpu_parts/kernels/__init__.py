"""Times of single kernels, and of the device itself."""
