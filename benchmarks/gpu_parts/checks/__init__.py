"""Numerics, before anything is timed."""
