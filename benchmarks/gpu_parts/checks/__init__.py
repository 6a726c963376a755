"""Checks of numerics before any timing."""
