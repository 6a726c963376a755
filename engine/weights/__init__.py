"""Checkpoints: files, formats, rounding."""
