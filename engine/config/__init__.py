"""A model's sizes and switches, read from its ``config.json``."""
