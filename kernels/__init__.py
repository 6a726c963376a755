"""Triton kernels of the model's hot path, each beside its torch reference.

A wrapper checks its arguments and launches on the current CUDA (or HIP) device; no wrapper reads device
values on the host. The `*_reference` functions keep the same contract in torch operations, on any device.
Importing this package needs triton but no GPU. Not for weights, models or scheduling: it imports nothing
else of kvrelay.
"""
