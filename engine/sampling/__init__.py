"""From logits to tokens; each step of that is a module."""
