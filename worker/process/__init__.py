"""A worker process: its life from start to exit, and its small HTTP server for probes and metrics."""
