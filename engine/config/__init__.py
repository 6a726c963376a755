"""A model's shape as its ``config.json`` tells it."""
