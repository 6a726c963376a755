"""Policies: who is admitted when, and which workers compute. Pure state and functions; the caller brings the time."""
