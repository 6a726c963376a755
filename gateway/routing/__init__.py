"""Policies: when a request is admitted, and which workers compute it. Pure state and functions; the caller passes the time."""
