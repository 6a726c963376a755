"""A prompt's images on the way to the model: what a prompt has in their place, and their pixels."""
