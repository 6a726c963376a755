"""One command that serves a model on this machine: plan, processes, terminal view."""
