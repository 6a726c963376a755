"""Serves a model on this machine with one command: plan, processes, terminal view."""
