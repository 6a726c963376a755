"""Triton kernels of the model's hot path, each beside its torch reference.

A wrapper checks its arguments and launches on the current CUDA (or HIP) device. No wrapper reads device values on the host. The
`*_reference` functions do the same in torch operations on any device. Importing this package needs triton but no GPU. It knows no
weights, models or scheduling, and imports nothing else of kvrelay.
"""
