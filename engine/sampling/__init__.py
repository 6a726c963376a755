"""From logits to tokens; each step of the way is a module."""
