"""A worker process: its life from start to exit, and its small HTTP side for probes and metrics."""
