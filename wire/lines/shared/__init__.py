"""Blocks through shared memory between two workers on one host."""
